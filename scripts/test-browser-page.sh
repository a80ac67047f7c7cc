#!/usr/bin/env bash
# Builds demos/browser and checks it in headless Chromium: right results for 1 to 3 ranks, the bytes that they send, no
# request to another origin, the words where WebGPU is missing, and a wrong result, which must be seen.
# Takes about half a minute, and needs what scripts/test-browser.sh installs. KYKLOS_CHROMIUM names another Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
playwright=target/tools/playwright/node_modules/playwright-core
[ -d "$playwright" ] || {
    echo "test-browser-page: playwright-core is missing; scripts/test-browser.sh installs it" >&2
    exit 1
}
chromium=$(command -v "${KYKLOS_CHROMIUM:-chromium}") || {
    echo "test-browser-page: there is no ${KYKLOS_CHROMIUM:-chromium}; name one in KYKLOS_CHROMIUM" >&2
    exit 1
}
demos/browser/build.sh
timeout --kill-after=20 300 node demos/browser/tests/run.mjs target/demos/browser-page "$playwright" "$chromium" "$@"
