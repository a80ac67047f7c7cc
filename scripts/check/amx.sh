#!/usr/bin/env bash
# Runs the tests of the CPU backend with the tile registers of AMX, on a processor that has them. Fails where no test ran or AMX
# was not used.
#   scripts/check/amx.sh             every test of the backend
#   scripts/check/amx.sh FILTER...   the tests whose names contain one of these
#   scripts/check/amx.sh --check     runs nothing; says what is missing here
# KYKLOS_AMX_SECONDS bounds the run of the tests (default 2400).
set -euo pipefail
cd "$(dirname "$0")/../.."
cannot() { echo "AMX cannot be tested: $1" >&2; exit 1; }

[ "$(uname -sm)" = "Linux x86_64" ] || cannot "this is $(uname -sm), and the tests are for Linux on x86-64"
grep -qw amx_bf16 /proc/cpuinfo || cannot "the processor has no AMX"
[ "${1:-}" != --check ] || exit 0

# The test of tiles fails where there are none.
which=("$@" products_of_tiles)
[ $# != 0 ] || which=(backend::cpu::tests)
log=target/test-amx.log
mkdir -p target
KYKLOS_REQUIRE_AMX=1 RUST_TEST_THREADS=1 timeout --foreground "${KYKLOS_AMX_SECONDS:-2400}" \
    cargo test --release -q -p kyklos --no-default-features --features cpu --lib -- "${which[@]}" 2>&1 | tee "$log"
grep -q '^test result: ok\. [1-9]' "$log" || cannot "no test ran"
