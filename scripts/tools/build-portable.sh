#!/usr/bin/env bash
# Builds the program and the Python wheel for Linux so that they start with glibc 2.28 and every later one (RHEL 8, Debian 10,
# Ubuntu 20.04), wherever it runs. What is built on a machine as usual may need the glibc of that machine. The linker is that of Zig,
# which knows the symbols of every glibc and links for other processors too. The script checks that nothing newer is asked for, and
# runs both; those for aarch64 only where there is an emulator (qemu-aarch64) and the glibc for it, see below.
# Installs cargo-zigbuild, ziglang and maturin from PyPI into target/portable/venv. Needs readelf (binutils). 20 minutes on two busy cores:
# program and wheel are compiled with other flags, and share nothing.
#   scripts/tools/build-portable.sh                    program and wheel, for x86-64
#   scripts/tools/build-portable.sh program            one of them; the other is `wheel`
#   scripts/tools/build-portable.sh program aarch64    for aarch64; also `wheel aarch64` and `all aarch64`
# The result: target/portable/kyklos and target/portable/kyklos-*.whl, each with LICENSE-THIRD-PARTY of what is linked in;
# for aarch64 in target/portable/aarch64.
set -euo pipefail
cd "$(dirname "$0")/../.."
export CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none} CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
# By the linker: strip knows the processor of this machine only.
export CARGO_PROFILE_RELEASE_STRIP=symbols
glibc=2.28
processor=${2:-x86_64}
target=$processor-unknown-linux-gnu
result=$PWD/target/portable
venv=$result/venv
export CARGO_TARGET_DIR=$result/build
case "${1:-all} $processor" in
"all x86_64" | "program x86_64" | "wheel x86_64") ;;
"all aarch64" | "program aarch64" | "wheel aarch64") result=$result/aarch64 ;;
*) echo "usage: scripts/tools/build-portable.sh [all|program|wheel] [x86_64|aarch64]" >&2 && exit 2 ;;
esac
mkdir -p "$result"

# The newest version of glibc that a file asks for must not be newer than $glibc.
check_glibc() {
    local newest
    newest=$(readelf --wide --version-info "$1" | grep -o 'GLIBC_[0-9][0-9.]*' | sed 's/GLIBC_//' | sort -Vu | tail -n 1)
    [ -n "$newest" ] || { echo "build-portable: $1 names no version of glibc" >&2; exit 1; }
    if [ "$(printf '%s\n' "$newest" "$glibc" | sort -V | tail -n 1)" != "$glibc" ]; then
        echo "build-portable: $1 needs glibc $newest, and should start with $glibc:" >&2
        readelf --wide --dyn-syms "$1" | grep "GLIBC_$newest" >&2
        exit 1
    fi
    echo "== $(basename "$1") for $processor: needs glibc $newest or later"
}

# The glibc of Debian for a foreign processor: the package libc6-arm64-cross.
emulator=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
can_emulate() { command -v "${emulator[0]}" >/dev/null && [ -e /usr/aarch64-linux-gnu/lib/libc.so.6 ]; }

program() {
    cargo zigbuild --release --locked -p kyklos-cli --target "$target.$glibc"
    install -m 755 "$CARGO_TARGET_DIR/$target/release/kyklos" "$result/kyklos"
    check_glibc "$result/kyklos"
    python3 scripts/tools/licences.py kyklos-cli "$target" >"$result/LICENSE-THIRD-PARTY"
    if [ "$processor" = x86_64 ]; then
        "$result/kyklos" launch -n 2 -- attend --device cpu --shape 1,256,4,2,32 --verify | grep '^verified'
    elif can_emulate; then
        # `launch` starts this program again, which needs an emulator that the kernel knows.
        "${emulator[@]}" "$result/kyklos" attend --device cpu --shape 1,256,4,2,32 --mesh 1x3 --verify | grep '^verified'
    else
        echo "== the program for $processor was not run: there is no ${emulator[0]} with a glibc"
    fi
}

wheel() {
    rm -f "$result"/kyklos-*.whl
    # Wheels have the files LICENSE-*.
    python3 scripts/tools/licences.py kyklos-python "$target" >python/LICENSE-THIRD-PARTY
    # maturin checks the versions of symbols too, and names the wheel after the glibc.
    maturin build --release --locked --zig --target "$target" --compatibility "manylinux_${glibc/./_}" -m python/Cargo.toml -o "$result"
    rm python/LICENSE-THIRD-PARTY
    local unpacked
    unpacked=$(mktemp -d)
    python -m zipfile -e "$result"/kyklos-*.whl "$unpacked"
    check_glibc "$unpacked"/kyklos/_kyklos.abi3.so
    local licence
    for licence in MIT APACHE THIRD-PARTY; do
        compgen -G "$unpacked/kyklos-*.dist-info/licenses/LICENSE-$licence" >/dev/null ||
            { echo "build-portable: the wheel has no LICENSE-$licence" >&2; exit 1; }
    done
    if [ "$processor" = x86_64 ]; then
        PYTHONPATH=$unpacked python -c 'import kyklos; print("imported, on", kyklos.Group.local(1)[0].device)'
    else
        echo "== the wheel for $processor was not imported here"
    fi
    rm -r "$unpacked"
}

[ -x "$venv/bin/pip" ] || scripts/tools/make-venv.sh "$venv"
export PATH=$venv/bin:$PATH
python -m pip install --quiet --disable-pip-version-check 'cargo-zigbuild==0.24.*' 'ziglang==0.17.*' 'maturin>=1.16,<2'
rustup target list --installed 2>/dev/null | grep -qx "$target" || rustup target add "$target"
case "${1:-all}" in
all) program && wheel ;;
*) "$1" ;;
esac
