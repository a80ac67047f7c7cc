#!/usr/bin/env bash
# Checks the pages of --report and --watch in headless Chromium: they fit a desk, a phone and paper, texts have contrast in light and
# dark, the numbers are those of --json, the live page follows a call to its end. Screenshots go to target/pages/.
# Takes about a minute after the build. Installs what is missing (scripts/tools/browser.sh). KYKLOS_CHROMIUM names another Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/tools/browser.sh
find_chromium
install_playwright
cargo build --release -q -p kyklos-cli
timeout --kill-after=20 600 node cli/tests/browser/pages.mjs target/release/kyklos "$PWD/$playwright/node_modules/playwright-core" \
    "$KYKLOS_CHROMIUM" target/pages
