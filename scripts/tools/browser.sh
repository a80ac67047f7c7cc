# What the scripts of the browser share; they read this file with `.`, in the root of the project. Installs what is missing:
# Chromium and Node.js on Debian and Ubuntu, the wasm target of rustup, and playwright-core and wasm-bindgen under target/tools
# in the pinned versions. Whatever cannot be installed is a failure.
tools=target/tools
playwright=$tools/playwright

fail() {
    echo "$(basename "$0" .sh): $*" >&2
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

# Sets KYKLOS_CHROMIUM, unless it names one.
find_chromium() {
    if [ -n "${KYKLOS_CHROMIUM:-}" ]; then
        command -v "$KYKLOS_CHROMIUM" >/dev/null || fail "KYKLOS_CHROMIUM names $KYKLOS_CHROMIUM, which cannot be run"
        KYKLOS_CHROMIUM=$(command -v "$KYKLOS_CHROMIUM")
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
    local package=tests/browser/page
    command -v node >/dev/null || apt_install nodejs
    [ "$(node -p 'parseInt(process.versions.node)')" -ge 20 ] || fail "Node.js $(node --version) is too old: 20 or later"
    # A changed pin makes a new installation; the copy of the lock is written last, so half of one is made again.
    cmp -s "$package/package-lock.json" "$playwright/installed.json" && return
    command -v npm >/dev/null || apt_install npm
    rm -rf "$playwright"
    mkdir -p "$playwright"
    cp "$package/package.json" "$package/package-lock.json" "$playwright"
    (cd "$playwright" && npm ci --ignore-scripts --no-audit --no-fund --quiet) ||
        fail "npm cannot install playwright-core, which drives the browser"
    cp "$package/package-lock.json" "$playwright/installed.json"
}

# wasm_page PACKAGE LIBRARY FOLDER: compiles the package at that path to wasm, with its JavaScript, into the folder.
wasm_page() {
    local package=$1 library=$2 out=$3 built=target/browser version
    scripts/tools/lock.sh "$package" || fail "there is no lock for $package"
    version=$(sed -n '/^name = "wasm-bindgen"$/{n;s/^version = "\(.*\)"$/\1/p}' "$package/Cargo.lock")
    # A debug build: it compiles in half the time and runs for seconds. With its own lock it may name crates that a
    # mirror has not got.
    "$tools/bin/wasm-bindgen" --version 2>/dev/null | grep -qx "wasm-bindgen $version" ||
        cargo install --quiet --debug --force --root "$tools" wasm-bindgen-cli --version "$version" ||
        fail "cargo cannot install wasm-bindgen-cli $version"
    rustup target list --installed 2>/dev/null | grep -q wasm32-unknown-unknown ||
        rustup target add wasm32-unknown-unknown || fail "rustup cannot add the target wasm32-unknown-unknown"
    # With a target folder of its own: its compiler flags and features are not those of the workspace.
    CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none} cargo build --quiet --release --locked \
        --target wasm32-unknown-unknown --manifest-path "$package/Cargo.toml" --target-dir "$built"
    mkdir -p "$out"
    "$tools/bin/wasm-bindgen" --target web --no-typescript --out-dir "$out" \
        "$built/wasm32-unknown-unknown/release/$library.wasm"
}
