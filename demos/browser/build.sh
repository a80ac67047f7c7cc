#!/usr/bin/env bash
# Builds the pages as static files: demos/browser/build.sh [FOLDER], by default target/demos/browser-page.
# Installs what is missing: the wasm target of rustup, and wasm-bindgen under target/tools.
set -euo pipefail
out=$(realpath -m "${1:-$(dirname "$0")/../../target/demos/browser-page}")
cd "$(dirname "$0")/../.."
. scripts/tools/browser.sh
wasm_page demos/browser kyklos_page "$out"
cp demos/browser/page/* "$out"
echo "the page is in $out"
