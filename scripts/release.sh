#!/usr/bin/env bash
# Makes everything that a release has, into target/release-VERSION/, and tests each part in a bare system (scripts/tools/bare.sh) that has
# nothing of this checkout: the packages for crates.io, the program and the wheel for Linux on x86-64 and aarch64 (glibc 2.28 and later),
# the source archive for PyPI, licence texts of everything that is linked in, and SHA256SUMS. What an earlier run has made goes first.
# Publishes nothing; the last lines say what does. Two hours on two cores from a fresh clone. Needs Linux on x86-64, rustup, Python 3.10
# and what the scripts that it calls need.
#   scripts/release.sh                    all parts
#   scripts/release.sh wheel sdist        some of: crates, program, wheel, sdist, arm; into target/release-VERSION-parts/
#   scripts/release.sh --draft [PART]...  also from a checkout with changes, and before the changelog has a date
#   scripts/release.sh --untested-aarch64 [PART]...  also where what is for aarch64 cannot be run; the end says what was not tested
# What is for aarch64 is run by an emulator: Debian's qemu-user, libc6-arm64-cross and debootstrap.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export CARGO_PROFILE_RELEASE_DEBUG=none CARGO_INCREMENTAL=0
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
result=$root/target/release-$version
work=$root/target/release-work
problem=(--device cpu --shape "1,256,4,2,32" --verify)

fail() { echo "release: $*" >&2; exit 1; }
say() { echo "== $* (${SECONDS} s)"; }

is_draft=false may_skip=false
while [[ ${1:-} == --* ]]; do
    case $1 in
    --draft) is_draft=true ;;
    --untested-aarch64) may_skip=true ;;
    *) echo "$1: the options are --draft and --untested-aarch64" >&2 && exit 2 ;;
    esac
    shift
done
is_whole=false
if [ $# = 0 ]; then is_whole=true && set -- crates program wheel sdist arm; else result=$result-parts; fi
for part in "$@"; do
    case $part in
    crates | program | wheel | sdist | arm) ;;
    *) echo "$part: the parts are crates, program, wheel, sdist and arm" >&2 && exit 2 ;;
    esac
done
allow=()
if $is_draft; then
    allow=(--allow-dirty)
else
    [ -z "$(git status --porcelain)" ] || fail "the checkout has changes: commit them, or --draft"
    grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)\$" CHANGELOG.md || fail "CHANGELOG.md has no date for $version: write it, or --draft"
fi
# What this machine makes and cannot run. The condition for the program is that of scripts/tools/build-portable.sh.
untested=()
if [[ " $* " == *" arm "* ]]; then
    if ! command -v qemu-aarch64 >/dev/null || [ ! -e /usr/aarch64-linux-gnu/lib/libc.so.6 ]; then
        untested=("the program for aarch64" "the wheel for aarch64")
    elif ! PATH=$PATH:/usr/sbin command -v debootstrap >/dev/null; then
        untested=("the wheel for aarch64")
    fi
    [ ${#untested[@]} = 0 ] || $may_skip || fail "what is for aarch64 cannot be run here: install qemu-user, libc6-arm64-cross and debootstrap, or --untested-aarch64"
fi
# SHA256SUMS is about what this run makes, and nothing else.
rm -rf "$result"
mkdir -p "$result" "$work"

# Cargo, its toolchain and what it has downloaded, for a command in a bare system: `with_cargo [OPTION]... -- COMMAND...`.
with_cargo() {
    local options=() toolchain cargo_home=${CARGO_HOME:-$HOME/.cargo}
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    toolchain=$(rustc --print sysroot)
    mkdir -p "$cargo_home/registry"
    scripts/tools/bare.sh --network --read "$toolchain" --write "$cargo_home/registry" "${options[@]}" -- \
        env CARGO_HOME="$cargo_home" PATH="$toolchain/bin:/usr/local/bin:/usr/bin:/bin" CARGO_PROFILE_RELEASE_DEBUG=none "$@"
}

# The Python of this machine with its folder, and wheels of NumPy and pip for it.
python=$(python3 -c 'import sys; print(sys._base_executable)')
python_folder=$(python3 -c 'import sys; print(sys.base_prefix)')
numpy() {
    mkdir -p "$work/wheels"
    compgen -G "$work/wheels/numpy-*" >/dev/null || "$python" -m pip download --quiet --disable-pip-version-check --only-binary :all: -d "$work/wheels" numpy
}

# in_python [OPTION]... -- PACKAGE: installs a package beside NumPy in an empty environment of a bare system, and tests it there.
in_python() {
    local options=() package
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    package=$2
    numpy
    scripts/tools/bare.sh --read "$result" --read "$work/wheels" --read "$python_folder" "${options[@]}" -- bash -euc '
        "$1" -m venv environment
        environment/bin/pip install --quiet --disable-pip-version-check --no-index --find-links "$2" "$3" numpy
        environment/bin/python -m kyklos cpu
        environment/bin/python -c "import importlib.metadata as m, kyklos; assert m.version(\"kyklos\") == kyklos.__version__ == \"$4\", kyklos.__version__"
    ' bare "$python" "$work/wheels" "$package" "$version"
}

# Maturin, and twine, which reads a package as PyPI does: `check_package FILE`.
tools() {
    [ -x "$work/venv/bin/pip" ] || scripts/tools/make-venv.sh "$work/venv"
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check 'maturin>=1.16,<2' twine
}
check_package() {
    tools
    "$work/venv/bin/twine" check --strict "$1"
}

# archive FOLDER NAME: an archive whose bytes depend on its files and on the commit only.
archive() {
    tar -C "$1" --format=ustar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" -cf - "$2" | gzip -9n >"$result/$2.tar.gz"
}

# The program for a processor, with what belongs to it: `program_archive PROCESSOR FOLDER-WITH-IT`.
program_archive() {
    local name=kyklos-$version-$1-linux
    rm -rf "${work:?}/$name"
    mkdir -p "$work/$name"
    cp "$2/kyklos" "$2/LICENSE-THIRD-PARTY" LICENSE-MIT LICENSE-APACHE CHANGELOG.md "$work/$name"
    cp cli/README.md "$work/$name/README.md"
    archive "$work" "$name"
}

part_crates() {
    local packages=() name options=()
    mapfile -t packages < <(python3 scripts/check/packages.py --names)
    for name in "${packages[@]}"; do options+=(-p "$name"); done
    # Compiles each package from its own files and the packages before it.
    CARGO_TARGET_DIR=$work/crates CARGO_PROFILE_DEV_DEBUG=0 cargo package --locked "${allow[@]}" "${options[@]}"
    for name in "${packages[@]}"; do cp "$work/crates/package/$name-$version.crate" "$result"; done
    say "crates: ${#packages[@]} packages, each compiled from its own files"

    # The program as `cargo install --locked` makes it: the packages of this release stand in for crates.io, and so the lock of the
    # program must not say that they are from there.
    local lock=$work/unpacked/kyklos-cli-$version/Cargo.lock
    rm -rf "$work/unpacked"
    mkdir -p "$work/unpacked" "$work/installed"
    for name in "${packages[@]}"; do tar -xzf "$result/$name-$version.crate" -C "$work/unpacked"; done
    options=()
    for name in "${packages[@]}"; do
        if [ "$name" = kyklos-cli ] || ! grep -qx "name = \"$name\"" "$lock"; then continue; fi
        options+=(--config "patch.crates-io.$name.path='$work/unpacked/$name-$version'")
    done
    awk '/^name = / { ours = /"kyklos/ } !(ours && /^(source|checksum) = /)' "$lock" >"$work/lock" && mv "$work/lock" "$lock"
    with_cargo --read "$work/unpacked" --write "$work/installed" -- \
        cargo install --quiet --locked --path "$work/unpacked/kyklos-cli-$version" --root "$work/installed" --target-dir "$work/installed/target" "${options[@]}"
    scripts/tools/bare.sh --read "$work/installed" -- "$work/installed/bin/kyklos" launch -n 2 -- attend "${problem[@]}" | grep '^verified'
    say "crates: kyklos-cli installs from the packages alone, and its result is right"
}

part_program() {
    scripts/tools/build-portable.sh program
    program_archive x86_64 target/portable
    scripts/tools/bare.sh --read "$result" -- bash -euc '
        tar -xzf "$1"
        cd kyklos-*
        [ -s LICENSE-MIT ] && [ -s LICENSE-APACHE ] && [ -s LICENSE-THIRD-PARTY ]
        [ "$(./kyklos --version)" = "kyklos $2" ]
        shift 2
        ./kyklos launch -n 2 -- attend "$@"
    ' bare "$result/kyklos-$version-x86_64-linux.tar.gz" "$version" "${problem[@]}" | grep '^verified'
    say "program: two processes over QUIC in a bare system, verified"
}

part_wheel() {
    scripts/tools/build-portable.sh wheel
    cp target/portable/kyklos-*.whl "$result"
    local made=("$result"/kyklos-*_x86_64.whl)
    check_package "${made[0]}"
    in_python -- "${made[0]}"
    scripts/check/types.sh "${made[0]}"
    say "wheel: installed and tested in a bare system"
}

part_sdist() {
    local name=kyklos-$version folder=$work/sdist-unpacked
    tools
    rm -rf python/LICENSE-THIRD-PARTY "$folder"
    mkdir -p "$folder"
    "$work/venv/bin/maturin" sdist -m python/Cargo.toml -o "$folder"
    # Maturin packs the lock of the whole workspace, which Cargo refuses with --locked, and a crate for tests of the CUDA backend.
    tar -xzf "$folder/$name.tar.gz" -C "$folder"
    rm -r "$folder/$name/cuda-backend/fake"
    sed -i '/^kyklos-fake-cuda/d; s|"cuda-backend/fake", ||' "$folder/$name/Cargo.toml" "$folder/$name/cuda-backend/Cargo.toml"
    cargo metadata --quiet --offline --format-version 1 --manifest-path "$folder/$name/Cargo.toml" >/dev/null
    ! grep '^checksum = ' "$folder/$name/Cargo.lock" | grep -vxFf Cargo.lock || fail "the lock of the source archive has packages that the workspace has not"
    archive "$folder" "$name"
    check_package "$result/$name.tar.gz"
    # pip builds with maturin from these wheels.
    "$python" -m pip download --quiet --disable-pip-version-check --only-binary :all: -d "$work/wheels" 'maturin>=1.16,<2'
    mkdir -p "$work/sdist"
    # With the toolchain on the PATH of pip, and a folder for what it compiles, so that a second run is shorter.
    numpy
    with_cargo --read "$result" --read "$work/wheels" --read "$python_folder" --write "$work/sdist" -- bash -euc '
        "$1" -m venv environment
        CARGO_TARGET_DIR="$5" MATURIN_PEP517_ARGS=--locked environment/bin/pip install --quiet --disable-pip-version-check --no-index --find-links "$2" "$3" numpy
        environment/bin/python -m kyklos cpu
        [ "$(environment/bin/python -m kyklos --version)" = "kyklos $4" ]
    ' bare "$python" "$work/wheels" "$result/$name.tar.gz" "$version" "$work/sdist"
    say "sdist: built with its lock, installed and tested in a bare system"
}

part_arm() {
    scripts/tools/build-portable.sh all aarch64
    program_archive aarch64 target/portable/aarch64
    cp target/portable/aarch64/kyklos-*.whl "$result"
    check_package "$(echo "$result"/kyklos-*_aarch64.whl)"
    say "arm: program and wheel for aarch64"
    [ ${#untested[@]} = 0 ] || return 0
    # A Python for aarch64 out of Debian's packages, which an emulator runs: nothing of it is installed on this machine.
    local system=$work/arm-system site=$work/arm-site as_root=() package
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    if [ ! -e "$system/complete" ]; then
        "${as_root[@]}" rm -rf "$system"
        "${as_root[@]}" debootstrap --arch=arm64 --foreign --variant=minbase --include=python3 bookworm "$system" >"$work/debootstrap.log"
        for package in "$system"/var/cache/apt/archives/*.deb; do "${as_root[@]}" dpkg-deb -x "$package" "$system"; done
        "${as_root[@]}" touch "$system/complete"
    fi
    rm -rf "$site"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.11 --target "$site" \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 numpy "$result"/kyklos-*_aarch64.whl
    PYTHONPATH=$site qemu-aarch64 -L "$system" "$system/usr/bin/python3.11" -m kyklos cpu
    say "arm: the wheel tested by an emulator"
}

python3 scripts/check/packages.py
for part in "$@"; do "part_$part"; done
(cd "$result" && rm -f SHA256SUMS && sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" SHA256SUMS && cat SHA256SUMS)
say "passed: $*"
for each in "${untested[@]}"; do echo "NOT TESTED: $each"; done
if ! $is_whole || $is_draft; then exit; fi
cat <<PUBLISH
To publish what is in target/release-$version:
  git tag -s v$version && git push origin v$version
  cargo publish --workspace --locked
  twine upload $(cd "$result" && echo ./*.whl "kyklos-$version.tar.gz")
PUBLISH
