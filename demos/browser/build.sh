#!/usr/bin/env bash
# Builds the page as static files: demos/browser/build.sh [FOLDER], by default target/demos/browser-page.
# Installs what is missing: the wasm target of rustup, and wasm-bindgen under target/tools in the version that
# demos/browser/Cargo.lock pins.
set -euo pipefail
out=$(realpath -m "${1:-$(dirname "$0")/../../target/demos/browser-page}")
cd "$(dirname "$0")/../.."
export CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none}

package=demos/browser
built=target/browser
tools=target/tools

rustup target list --installed 2>/dev/null | grep -q wasm32-unknown-unknown || rustup target add wasm32-unknown-unknown
version=$(sed -n '/^name = "wasm-bindgen"$/{n;s/^version = "\(.*\)"$/\1/p}' "$package/Cargo.lock")
"$tools/bin/wasm-bindgen" --version 2>/dev/null | grep -qx "wasm-bindgen $version" ||
    cargo install --quiet --debug --force --root "$tools" wasm-bindgen-cli --version "$version"
# With a target folder of its own: its compiler flags and features are not those of the workspace.
cargo build --quiet --release --locked --target wasm32-unknown-unknown --manifest-path "$package/Cargo.toml" \
    --target-dir "$built"
mkdir -p "$out"
"$tools/bin/wasm-bindgen" --target web --no-typescript --out-dir "$out" \
    "$built/wasm32-unknown-unknown/release/kyklos_page.wasm"
cp "$package"/page/* "$out"
echo "the page is in $out"
