#!/usr/bin/env bash
# Runs a Linux program for x86-64 on an emulated Sapphire Rapids with AMX and AVX-512, for machines without them: boots a Linux kernel
# in Bochs with an initramfs of the program, its shared libraries and the files in FILES. Prints the program's output and exits with
# its exit status; 125: something is missing here, or the guest did not come to its end within LIMIT seconds (the kernel's last lines
# are printed then). Everything lies in the guest under the paths it has here, and the program starts in the current folder.
# The guest has one processor, about a hundred times slower than a real one. Needs no privileges.
# Usage: scripts/emulator/run.sh [NAME=VALUE…] PROGRAM [ARGUMENT…]
#        scripts/emulator/run.sh --check    only says what is missing here
# Needs as, ld and objcopy (binutils), what unpacks the kernel (xz, zstd or gzip), and
#   BOCHS    a Bochs with bochs.patch of this folder; default: bochs. To build it (a C++ compiler and make, some minutes):
#              git clone https://github.com/bochs-emu/Bochs && cd Bochs && git checkout 783b58fd6d9b
#              patch -d bochs -p1 <…/scripts/emulator/bochs.patch && mkdir build && cd build
#              ../bochs/configure --enable-all-optimizations --enable-x86-64 --enable-avx --enable-evex --enable-amx --with-nogui \
#                  --disable-docbook && make bochs
#   KERNEL   a vmlinuz of Linux 5.16 or newer with an 8250 console, devtmpfs and /dev/port, as Debian 12's is (6.1; unpacked from
#            its package, it need not be installed); default: the newest in /boot
#   BUSYBOX  a static busybox (Debian: busybox-static); default: busybox
# Also read: MEMORY (MiB of the guest, 512), FILES (files and folders to bring, separated by blanks), IPS (instructions in a second of
# the guest's time, 100000000), LIMIT (seconds, 600), KEEP (a folder for the kernel's and the emulator's log), APPEND (more arguments
# of the kernel).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
fail() { echo "$1" >&2; exit 125; }
for tool in as ld objcopy; do
    command -v "$tool" >/dev/null || fail "there is no $tool: install binutils"
done
bochs=$(realpath "$(command -v "${BOCHS:-bochs}")" 2>/dev/null) || fail "there is no Bochs: name one with AMX in BOCHS"
busybox=$(realpath "$(command -v "${BUSYBOX:-busybox}")" 2>/dev/null) || fail "there is no busybox: name a static one in BUSYBOX"
! ldd "$busybox" 2>/dev/null | grep -q '=>' || fail "$busybox is not static: name one in BUSYBOX"
# shellcheck disable=SC2012 # names of kernels have no newlines
kernel=${KERNEL:-$(ls -v /boot/vmlinuz-* 2>/dev/null | tail -n 1 || true)}
[ -r "$kernel" ] || fail "there is no Linux kernel to read: name a vmlinuz in KERNEL"
kernel=$(realpath "$kernel")
[ "${1:-}" != --check ] || exit 0
memory=${MEMORY:-512} ips=${IPS:-100000000} limit=${LIMIT:-600} keep=${KEEP:+$(mkdir -p "$KEEP" && realpath "$KEEP")}

variables=()
while [[ ${1:-} =~ ^[A-Za-z_][A-Za-z_0-9]*= ]]; do variables+=("$1"); shift; done
[ $# -gt 0 ] || fail "usage: $0 [NAME=VALUE…] PROGRAM [ARGUMENT…]"
program=$(realpath "$(command -v "$1")") || fail "there is no program $1"
shift

scratch=$(mktemp -d)
emulator=
trap '[ -z "$emulator" ] || kill "$emulator" 2>/dev/null || true; rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
folder=$PWD
root=$scratch/root
mkdir -p "$root"/{bin,proc,sys,dev,etc,tmp} "$root$folder"
cp "$busybox" "$root/bin/busybox"

# One file or folder under its own path, links followed.
bring() { mkdir -p "$root$(dirname "$1")"; cp -rLT "$1" "$root$1"; }
bring "$program"
# A static program has no list of libraries.
ldd "$program" 2>/dev/null | sed -n 's,^[^/]*\(/[^ ]*\).*,\1,p' | sort -u >"$scratch/libraries" || true
while read -r library; do bring "$library"; done <"$scratch/libraries"
for file in ${FILES:-}; do bring "$(realpath -s "$file")"; done

{
    printf 'cd %q && exec /bin/busybox env PATH=/bin HOME=/tmp TMPDIR=/tmp' "$folder"
    printf ' %q' "${variables[@]}" "$program" "$@"
    echo
} >"$root/etc/command"
cat >"$root/init" <<'INIT'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
exec </dev/null >/dev/ttyS0 2>&1
$b stty -F /dev/ttyS1 raw
$b sh /etc/command >/dev/ttyS1 2>&1
echo "exit status: $?"
# The emulator ends at this word in its port 0x8900.
$b sleep 0.1
for c in S h u t d o w n; do
    $b printf $c | $b dd of=/dev/port bs=1 seek=35072 2>/dev/null
done
INIT
chmod +x "$root/init"
cd "$scratch"
(cd root && find . | "$busybox" cpio -o -H newc 2>/dev/null) >initrd

# vmlinux lies packed in vmlinuz; unpacked here, it takes the emulator half a minute less. Offsets: the kernel's boot protocol.
number() { od -An -j "$(($1))" -N "$2" -t "u$2" "$kernel" | tr -d ' '; }
start=$((($(number 0x1f1 1) + 1) * 512 + $(number 0x248 4))) length=$(number 0x24c 4)
packed() { tail -c +$((start + 1)) "$kernel" | head -c "$length" || true; }
case $(packed | head -c 4 | od -An -t x1 | tr -d ' ') in
    fd377a58) packed | xz -dc --single-stream >vmlinux ;;
    28b52ffd) packed | head -c -4 | zstd -qdc >vmlinux ;;
    1f8b*) packed | gzip -dc >vmlinux ;;
    *) fail "the packing of $kernel is not known" ;;
esac
objcopy -O binary vmlinux kernel
truncate -s %512 kernel

# fsrm: Bochs has no MISC_ENABLE, so Linux turns ERMS off and FSRM alone makes memmove of short ranges run away. No self-tests of the
# kernel's ciphers: seven of fifteen seconds.
printf '%s' "console=ttyS0,115200 quiet nokaslr mitigations=off acpi=off tsc_early_khz=$((ips / 1000)) clearcpuid=fsrm" \
    " cryptomgr.notests panic=-1 ${APPEND:-}" >cmdline
as --64 --defsym KERNEL_SECTORS=$(($(stat -c %s kernel) / 512)) --defsym INITRD_SIZE="$(stat -c %s initrd)" \
    --defsym MEMORY=$((memory << 20)) -o firmware.o "$here/firmware.S"
ld -e _start -Ttext=0xffff0000 --oformat binary -o firmware firmware.o
cat kernel initrd >disk
truncate -s %1008K disk # whole cylinders of 16 heads and 63 sectors
head -c 512 /dev/zero >vga
cat >bochsrc <<RC
display_library: nogui
megs: $memory
romimage: file=firmware
vgaromimage: file=vga
cpu: model=sapphire_rapids, count=1, ips=$ips, ignore_bad_msrs=1, reset_on_triple_fault=0
clock: sync=none
pci: enabled=0
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, path=disk, mode=flat
com1: enabled=1, mode=file, dev=console
com2: enabled=1, mode=file, dev=output
log: log
panic: action=fatal
error: action=report
info: action=report
debug: action=ignore
RC
: >output
: >console
timeout -k 10 "$limit" "$bochs" -q -f bochsrc >bochs.out 2>&1 </dev/null &
emulator=$!
tail -c +1 -f -s 0.2 --pid="$emulator" output 2>/dev/null &
reader=$!
within=
ended=0
wait "$emulator" || ended=$?
case $ended in 124 | 137) within=" within $limit s" ;; esac # what else it ends with says nothing of the guest
emulator=
wait "$reader" || true
if [ -n "$keep" ]; then cp console log "$keep"; fi
status=$(sed -n 's/^exit status: \([0-9]*\).*/\1/p' console | tail -1)
if [ -z "$status" ]; then
    { echo "the guest did not come to its end$within:"; tail -15 console; grep -h 'PANIC\|no resolution' log | tail -3; } >&2 || true
    exit 125
fi
exit "$status"
