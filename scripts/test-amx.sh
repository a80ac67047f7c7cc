#!/usr/bin/env bash
# Runs the tests of the CPU backend with the tile registers of AMX: on this machine where its processor has them, otherwise in an
# emulator (scripts/emulator/run.sh says what it needs: BOCHS, KERNEL, BUSYBOX). Fails where no test ran or AMX was not used.
#   scripts/test-amx.sh             on the processor every test; in the emulator, in five minutes of a core, all but two: those of all
#                                   shapes and masks would take half an hour more (an emulator is a hundred times slower)
#   scripts/test-amx.sh FILTER...   the tests whose names contain one of these
#   scripts/test-amx.sh --check     runs nothing; says what is missing here
# KYKLOS_AMX_SECONDS bounds the run of the tests (default 2400).
set -euo pipefail
cd "$(dirname "$0")/.."
cannot() { echo "AMX cannot be tested: $1" >&2; exit 1; }

[ "$(uname -sm)" = "Linux x86_64" ] || cannot "this is $(uname -sm), and the tests are for Linux on x86-64"
seconds=${KYKLOS_AMX_SECONDS:-2400}
run=(timeout --foreground "$seconds" env)
emulated=false
if ! grep -qw amx_bf16 /proc/cpuinfo; then
    missing=$(scripts/emulator/run.sh --check 2>&1) ||
        cannot "the processor has no AMX, and for the emulator $missing (see scripts/emulator/run.sh)"
    run=(env LIMIT="$seconds" scripts/emulator/run.sh)
    emulated=true
fi
[ "${1:-}" != --check ] || exit 0

# The test of tiles fails where there are none.
which=("$@" products_of_tiles)
if [ $# = 0 ]; then
    which=(backend::cpu::tests)
    ! $emulated || which+=(--skip shapes_masks)
fi
# Only the features of this backend: the emulator reads the whole program from its disk.
program=$(cargo test --release -q -p kyklos --no-default-features --features cpu --lib --no-run --message-format=json-render-diagnostics |
    grep -o '"executable":"[^"]*"' | tail -n 1 | cut -d'"' -f4)
[ -n "$program" ] || cannot "cargo names no test executable"
log=target/test-amx.log
mkdir -p target
"${run[@]}" KYKLOS_REQUIRE_AMX=1 RUST_TEST_THREADS=1 "$program" "${which[@]}" 2>&1 | tee "$log"
grep -q '^test result: ok\. [1-9]' "$log" || cannot "no test ran"
