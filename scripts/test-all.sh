#!/usr/bin/env bash
# Everything that scripts/test.sh samples, in full, and what needs minutes or tools of its own. Prints the time of each part
# and, at the end, what could not run here. An hour and more on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
# Seconds for each target of the bounded fuzzing, instead of a fixed number of inputs.
export KYKLOS_TESTS=all KYKLOS_FUZZ_SECONDS=${KYKLOS_FUZZ_SECONDS:-20}
export CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none}

left_out=()
part() {
    local name=$1 start=$SECONDS
    shift
    echo "== $name"
    "$@"
    echo "== $name: $((SECONDS - start)) s"
}
part tests scripts/test.sh
part planted-bugs cargo test --release --workspace --all-features --test emulator -- --ignored planted_bugs
part cuda scripts/check/cuda.sh
part vendors scripts/check/vendors.sh
part outside scripts/test-outside.sh
part guide scripts/test-guide.sh
part demos scripts/test-demos.sh
part python scripts/test-python.sh
part namespaces scripts/test-namespaces.sh --all target/release/kyklos
part newest-mesa scripts/test-newest-mesa.sh
part soak scripts/soak.sh 3
if command -v npm >/dev/null; then
    part workflows scripts/check/workflows.sh
else
    left_out+=("workflows: there is no npm here")
fi
if missing=$(scripts/check/amx.sh --check 2>&1); then
    part amx scripts/check/amx.sh
else
    left_out+=("amx: $missing")
fi
if [ -n "${KYKLOS_CHROMIUM:-}" ] || command -v chromium >/dev/null || command -v chromium-browser >/dev/null ||
    command -v google-chrome >/dev/null; then
    part browser scripts/test-browser.sh
    part pages scripts/test-pages.sh
else
    left_out+=("browser: there is no Chromium here; scripts/test-browser.sh installs it on Debian and Ubuntu")
fi
if cargo +nightly fuzz --version >/dev/null 2>&1 || { [ "${RUSTC_BOOTSTRAP-}" = 1 ] && cargo fuzz --version >/dev/null 2>&1; }; then
    part fuzz scripts/fuzz.sh 20
else
    left_out+=("fuzz: there is no cargo-fuzz for a nightly compiler, see fuzz/README.md")
fi
for one in ${left_out[@]+"${left_out[@]}"}; do echo "not run: $one"; done
echo "all parts passed in $SECONDS s"
