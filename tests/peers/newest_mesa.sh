#!/bin/sh
# Unpacks the newest Vulkan drivers of Debian (Mesa's, from unstable) into a folder, with all that they need, libc among it,
# and Mesa's stand-ins for kernel drivers of GPUs (scripts/check/vendors.sh). Nothing is installed, and nothing outside the folder changes. Programs of this machine then run
# over the software driver (lavapipe) with FOLDER/run PROGRAM [ARGUMENTS], the program given as a path; a program that starts others over it finds
# that command in KYKLOS_RUNNER, because its own executable is the loader. What is unpacked already is kept: remove the
# folder for a newer one.
#   tests/peers/newest_mesa.sh [folder]      (default: target/newest-mesa; about 350 MB; Debian, x86-64)
set -eu
folder=${1:-target/newest-mesa}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
libraries=$folder/tree/usr/lib/x86_64-linux-gnu

unpack() {
    # From lines in use, one-line and deb822 alike; not from comments, and not the security archive.
    mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v '^ *#' |
        grep -oE 'https?://[^ ]+/debian( |/|$)' | tr -d ' ' | head -n 1)
    [ -n "$mirror" ] || { echo "no Debian mirror in /etc/apt: this script unpacks Debian packages" >&2; exit 1; }

    # A private package database in which nothing is installed yet: the whole closure is fetched.
    apt=$folder/apt
    mkdir -p "$apt/lists/partial" "$apt/archives/partial"
    : > "$apt/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" > "$apt/sources.list"
    fetch() {
        apt-get -qq -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
            -o Dir::State::Lists="$apt/lists" -o Dir::State::status="$apt/status" -o Dir::Cache::Archives="$apt/archives" \
            -o APT::Install-Recommends=false -o APT::Sandbox::User=root -o Debug::NoLocking=1 "$@"
    }
    fetch update
    fetch install -y --download-only mesa-vulkan-drivers mesa-drm-shim libvulkan1 libstdc++6 libgcc-s1 libatomic1 > /dev/null
    rm -rf "$folder/tree"
    for package in "$apt"/archives/*.deb; do dpkg -x "$package" "$folder/tree"; done
    rm -rf "$apt"
    touch "$folder/complete"
}
[ -e "$folder/complete" ] && [ -e "$libraries/libamdgpu_noop_drm_shim.so" ] || unpack

cat > "$folder/driver.json" <<END
{"file_format_version": "1.0.1", "ICD": {"api_version": "1.4.0", "library_path": "$libraries/libvulkan_lvp.so"}}
END
cat > "$folder/run" <<END
#!/bin/sh
# KYKLOS_DRIVER names another driver file.
export KYKLOS_RUNNER=$folder/run
driver=\${KYKLOS_DRIVER:-$folder/driver.json}
export VK_DRIVER_FILES=\$driver VK_ICD_FILENAMES=\$driver XDG_RUNTIME_DIR=\${XDG_RUNTIME_DIR:-/tmp}
exec $libraries/ld-linux-x86-64.so.2 --library-path $libraries "\$@"
END
chmod +x "$folder/run"
echo "$folder/run PROGRAM [ARGUMENTS] runs a program over this driver"
