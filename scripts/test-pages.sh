#!/usr/bin/env bash
# Checks the pages of --report and --watch in headless Chromium: they fit a desk, a phone and paper, texts have contrast in light and
# dark, the numbers are those of --json, the live page follows a call to its end. Screenshots go to target/pages/.
# Takes about a minute after the build, and needs what scripts/test-browser.sh installs. KYKLOS_CHROMIUM names another Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
playwright=target/tools/playwright/node_modules/playwright-core
[ -d "$playwright" ] || {
    echo "test-pages: playwright-core is missing; scripts/test-browser.sh installs it" >&2
    exit 1
}
chromium=$(command -v "${KYKLOS_CHROMIUM:-chromium}") || {
    echo "test-pages: there is no ${KYKLOS_CHROMIUM:-chromium}; name one in KYKLOS_CHROMIUM" >&2
    exit 1
}
cargo build --release -q -p kyklos-cli
timeout --kill-after=20 600 node cli/tests/browser/pages.mjs target/release/kyklos "$PWD/$playwright" "$chromium" target/pages
