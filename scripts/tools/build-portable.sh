#!/usr/bin/env bash
# Builds the program and the Python wheel for x86-64 Linux so that they start with glibc 2.28 and every later one (RHEL 8, Debian 10,
# Ubuntu 20.04), wherever it runs. What is built on a machine as usual may need the glibc of that machine. The linker is that of Zig,
# which knows the symbols of every glibc. The script checks that nothing newer is asked for, and runs both.
# Installs cargo-zigbuild, ziglang and maturin from PyPI into target/portable/venv. Needs readelf (binutils). 20 minutes on two busy cores:
# program and wheel are compiled with other flags, and share nothing.
#   scripts/tools/build-portable.sh            program and wheel
#   scripts/tools/build-portable.sh program    one of them; the other is `wheel`
# The result: target/portable/kyklos and target/portable/kyklos-*.whl
set -euo pipefail
cd "$(dirname "$0")/../.."
export CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none} CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
glibc=2.28
target=x86_64-unknown-linux-gnu
result=$PWD/target/portable
export CARGO_TARGET_DIR=$result/build

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
    echo "== $(basename "$1"): needs glibc $newest or later"
}

program() {
    cargo zigbuild --release --locked -p kyklos-cli --target "$target.$glibc"
    install -s "$CARGO_TARGET_DIR/$target/release/kyklos" "$result/kyklos"
    check_glibc "$result/kyklos"
    "$result/kyklos" launch -n 2 -- attend --device cpu --shape 1,256,4,2,32 --verify | grep '^verified'
}

wheel() {
    rm -f "$result"/kyklos-*.whl
    # maturin checks the versions of symbols too, and names the wheel after the glibc.
    maturin build --release --locked --zig --target "$target" --compatibility "manylinux_${glibc/./_}" -m python/Cargo.toml -o "$result"
    local unpacked
    unpacked=$(mktemp -d)
    python -m pip install --quiet --disable-pip-version-check --no-deps --target "$unpacked" "$result"/kyklos-*.whl
    check_glibc "$unpacked"/kyklos/_kyklos.abi3.so
    PYTHONPATH=$unpacked python -c 'import kyklos; print("imported, on", kyklos.Group.local(1)[0].device)'
    rm -r "$unpacked"
}

[ -x "$result/venv/bin/pip" ] || scripts/tools/make-venv.sh "$result/venv"
export PATH=$result/venv/bin:$PATH
python -m pip install --quiet --disable-pip-version-check 'cargo-zigbuild==0.24.*' 'ziglang==0.17.*' 'maturin>=1.16,<2'
rustup target list --installed 2>/dev/null | grep -qx "$target" || rustup target add "$target"
case "${1:-all}" in
all) program && wheel ;;
program | wheel) "$1" ;;
*) echo "usage: scripts/tools/build-portable.sh [program|wheel]" >&2 && exit 2 ;;
esac
