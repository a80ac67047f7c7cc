#!/usr/bin/env bash
# Runs the wgpu backend in a real browser: scripts/test-browser.sh [--all] [WORDS OF A CLAIM]
# Compiles it and the f64 oracle to wasm (tests/browser), opens them in headless Chromium, with its software WebGPU
# adapter where there is no other, and checks what every backend must do, few query rows, lost devices, memory and limits.
# Prints a line for each claim. What the browser complains of on its console,
# or in a shader, fails the claim. --all runs all of the shared cases, for about ten minutes, not those of one head dim.
# Installs what is missing: Chromium and Node.js on Debian and Ubuntu; playwright-core and wasm-bindgen under target/tools,
# in the versions pinned by tests/browser. KYKLOS_CHROMIUM names another Chromium.
# Whatever cannot be installed or run is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none}

package=tests/browser
built=target/browser
tools=target/tools
playwright=$tools/playwright
limit_s=600
[ "${1:-}" != --all ] || limit_s=1800

fail() {
    echo "test-browser: $*" >&2
    exit 1
}

# apt_install PACKAGE...
apt_install() {
    command -v apt-get >/dev/null || fail "$1 is missing, and this is no Debian or Ubuntu: install it by hand"
    echo "$1 is missing: installing $*"
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
        fail "apt-get cannot install $*; without it nothing is proven in a browser"
}

find_chromium() {
    if [ -n "${KYKLOS_CHROMIUM:-}" ]; then
        command -v "$KYKLOS_CHROMIUM" >/dev/null || fail "KYKLOS_CHROMIUM names $KYKLOS_CHROMIUM, which cannot be run"
        return
    fi
    local name
    for name in chromium chromium-browser google-chrome; do
        KYKLOS_CHROMIUM=$(command -v "$name") && return
    done
    apt_install chromium
    KYKLOS_CHROMIUM=$(command -v chromium) || fail "there is no Chromium; name one in KYKLOS_CHROMIUM"
}

install_playwright() {
    command -v node >/dev/null || apt_install nodejs
    [ "$(node -p 'parseInt(process.versions.node)')" -ge 20 ] || fail "Node.js $(node --version) is too old: 20 or later"
    # A changed pin makes a new installation; the copy of the lock is written last, so half of one is made again.
    cmp -s "$package/page/package-lock.json" "$playwright/installed.json" && return
    command -v npm >/dev/null || apt_install npm
    rm -rf "$playwright"
    mkdir -p "$playwright"
    cp "$package/page/package.json" "$package/page/package-lock.json" "$playwright"
    (cd "$playwright" && npm ci --ignore-scripts --no-audit --no-fund --quiet) ||
        fail "npm cannot install playwright-core, which drives the browser"
    cp "$package/page/package-lock.json" "$playwright/installed.json"
}

install_wasm_bindgen() {
    local version
    version=$(sed -n '/^name = "wasm-bindgen"$/{n;s/^version = "\(.*\)"$/\1/p}' "$package/Cargo.lock")
    "$tools/bin/wasm-bindgen" --version 2>/dev/null | grep -qx "wasm-bindgen $version" && return
    # A debug build: it compiles in half the time and runs for seconds. With its own lock it may name crates that a
    # mirror has not got.
    cargo install --quiet --debug --force --root "$tools" wasm-bindgen-cli --version "$version" ||
        fail "cargo cannot install wasm-bindgen-cli $version"
}

build() {
    rustup target list --installed 2>/dev/null | grep -q wasm32-unknown-unknown ||
        rustup target add wasm32-unknown-unknown || fail "rustup cannot add the target wasm32-unknown-unknown"
    # With a target folder of its own: its compiler flags and features are not those of the workspace.
    cargo build --quiet --release --locked --target wasm32-unknown-unknown --manifest-path "$package/Cargo.toml" \
        --target-dir "$built"
    rm -rf "$built/page"
    "$tools/bin/wasm-bindgen" --target web --out-dir "$built/page" \
        "$built/wasm32-unknown-unknown/release/kyklos_browser.wasm"
    cp "$package/page/index.html" "$package/page/page.mjs" "$built/page"
}

find_chromium
install_playwright
install_wasm_bindgen
echo "installed in $SECONDS s"
start=$SECONDS
build
echo "built in $((SECONDS - start)) s"
# In the background, so that whoever ends this script ends the browser as well.
timeout --kill-after=20 "$limit_s" \
    node "$package/page/run.mjs" "$built/page" "$playwright/node_modules/playwright-core" "$KYKLOS_CHROMIUM" "$@" &
runner=$!
trap 'kill "$runner" 2>/dev/null || true' EXIT
trap 'exit 143' INT TERM
status=0
wait "$runner" || status=$?
case $status in
0) echo "test-browser: passed in $SECONDS s" ;;
124 | 137) fail "not done after $limit_s s" ;;
*) fail "failed: see above" ;;
esac
