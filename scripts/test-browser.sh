#!/usr/bin/env bash
# Runs the wgpu backend in a real browser: scripts/test-browser.sh [--all] [WORDS OF A CLAIM]
# Compiles it and the f64 oracle to wasm (tests/browser), opens them in headless Chromium, with its software WebGPU
# adapter where there is no other, and checks what every backend must do, few query rows, lost devices, memory and limits.
# Prints a line for each claim. What the browser complains of on its console,
# or in a shader, fails the claim. --all runs all of the shared cases, for about ten minutes, not those of one head dim.
# Installs what is missing (scripts/tools/browser.sh). KYKLOS_CHROMIUM names another Chromium. Whatever cannot be installed or
# run is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/tools/browser.sh

package=tests/browser
page=target/browser/page
limit_s=600
[ "${1:-}" != --all ] || limit_s=1800

find_chromium
install_playwright
echo "installed in $SECONDS s"
start=$SECONDS
rm -rf "$page"
wasm_page "$package" kyklos_browser "$page"
cp "$package/page/index.html" "$package/page/page.mjs" "$page"
echo "built in $((SECONDS - start)) s"
# In the background, so that whoever ends this script ends the browser as well.
timeout --kill-after=20 "$limit_s" \
    node "$package/page/run.mjs" "$page" "$playwright/node_modules/playwright-core" "$KYKLOS_CHROMIUM" "$@" &
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
