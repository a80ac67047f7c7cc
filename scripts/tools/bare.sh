#!/usr/bin/env bash
# Runs a command in a bare system: the programs and libraries of this one (/usr, /etc), and otherwise empty folders, no variables, no
# other processes and no network but loopback. Nothing of a checkout or of a home is there. For tests of what users install.
#   scripts/tools/bare.sh [--network] [--read FOLDER]... [--write FOLDER]... [--] COMMAND...
# --network  with the network of this machine
# --read     the folder is there under its name, for reading; --write: for writing too
# The command starts in an empty folder that it may write, its home. Needs Linux, and root or the right to make namespaces of users.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
    network=(--net)
    for word; do
        [ "$word" != -- ] || break
        [ "$word" != --network ] || network=()
    done
    user=()
    [ "$(id -u)" = 0 ] || user=(--user --map-root-user)
    root=$(mktemp -d)
    trap 'rmdir "$root"' EXIT
    unshare "${user[@]}" "${network[@]}" --mount --pid --fork --kill-child --propagation private -- "$0" --inside "$root" "$@"
    exit
fi

root=$2
shift 2
mount -t tmpfs -o size=8g bare "$root"
# show MODE FOLDER
show() {
    mkdir -p "$root$2"
    mount --rbind "$2" "$root$2"
    # Where a user may not change the mount, it stays writable for him.
    [ "$1" = write ] || mount -o remount,bind,ro "$root$2" 2>/dev/null || true
}
for folder in /usr /etc; do show read $folder; done
for folder in /bin /sbin /lib /lib32 /lib64; do
    if [ -L $folder ]; then ln -s "$(readlink $folder)" "$root$folder"; elif [ -d $folder ]; then show read $folder; fi
done
show write /dev
mkdir -p "$root/tmp" "$root/run" "$root/home/user"
chmod 1777 "$root/tmp"
has_network=false
while [ $# -gt 0 ]; do
    case $1 in
    --network) has_network=true && shift ;;
    --read | --write) show "${1#--}" "$(realpath "$2")" && shift 2 ;;
    --) shift && break ;;
    *) break ;;
    esac
done
if $has_network && [ -e /etc/resolv.conf ]; then
    # It may be a link into a folder that is empty here, such as /run.
    resolver=$(realpath /etc/resolv.conf)
    if [ ! -e "$root$resolver" ]; then mkdir -p "$(dirname "$root$resolver")" && cp "$resolver" "$root$resolver"; fi
fi
mkdir -p "$root/proc"
mount -t proc proc "$root/proc"
$has_network || ip link set lo up
exec chroot "$root" /usr/bin/env -i --chdir=/home/user HOME=/home/user PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8 "$@"
