#!/usr/bin/env bash
# Checks demos/browser in headless Chromium. scripts/test-browser-page.sh [FOLDER FOR SCREENSHOTS]
# The page: right results for 1 to 3 ranks, the bytes that they send, no request to another origin, the words where WebGPU or its
# adapter is missing or the device is lost, and a wrong result, which must be seen. Tabs as devices of `kyklos attend`: exact with one and two tabs beside two
# native ranks, and a tab that is closed, frozen, killed, uninvited or old; a tab in another network namespace, whose link goes
# down. Builds pages and program, and installs what is missing (scripts/tools/browser.sh). Six minutes on two cores, once all is
# built.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/tools/browser.sh
pages=$PWD/target/demos/browser-page
program=${CARGO_TARGET_DIR:-target}/release/kyklos

find_chromium
install_playwright
demos/browser/build.sh "$pages"
cargo build --quiet --release -p kyklos-cli
[ $# = 0 ] || mkdir -p "$1"
core=$playwright/node_modules/playwright-core
timeout --kill-after=20 300 node demos/browser/tests/run.mjs "$pages" "$core" "$KYKLOS_CHROMIUM" "$@"
timeout --kill-after=20 900 node demos/browser/tests/tab.mjs "$pages" "$core" "$KYKLOS_CHROMIUM" "$program" "$@"

namespaces=(unshare --user --map-root-user --net)
if "${namespaces[@]}" ip link add near type veth peer name far 2>/dev/null; then
    command -v openssl >/dev/null || apt_install openssl
    timeout --kill-after=20 600 "${namespaces[@]}" \
        node demos/browser/tests/two-hosts.mjs "$pages" "$core" "$KYKLOS_CHROMIUM" "$(realpath "$program")"
else
    echo "ignored: a tab on another host: there is no unshare, no ip, or this user may make no namespaces with veth"
fi
