#!/usr/bin/env bash
# Runs the tests of the wgpu backend over the newest Mesa's software Vulkan, which tests/peers/newest_mesa.sh unpacks
# into target/newest-mesa (once; remove that folder for a newer version). It has what Debian 12's own driver lacks:
# matrices of 8x8x8 from f16 to f32, and subgroups without a workaround.
#   scripts/test-newest-mesa.sh --smoke  the matrix kernel at the smallest head dim: a quarter of a minute on one core
#   scripts/test-newest-mesa.sh          a selection, and the suite of all backends for matrices: some minutes on two cores when nothing is compiled
#   scripts/test-newest-mesa.sh --all    every test: some more minutes
#
# This driver's compiler is slow, and all but seconds of this script are compilation (the driver keeps what it compiled in
# target/newest-mesa-shaders), although its optimiser is off: with it, matrices and head dim 16 take 22 processor seconds
# instead of 3. The selection leaves out:
# - head dims above 64, and above 32 for the portable kernel: scripts/test.sh runs them on the installed driver, where they
#   compile in seconds. The head dim changes only how often loops run;
# - the matrix kernels except for the masks, rows and keys of one test in f16, head dims 16 and 32, and two tests of gradients.
#   The other tests take the portable kernel on such a device too, or use matrices at 64 and more.
#
# Fails where a kernel is not offered (portable, subgroups of 4, 8 and 16, matrices) and where no test ran.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
    --all | --smoke | '') amount=${1:-} ;;
    *)
        echo "unknown argument $1: there are --all and --smoke" >&2
        exit 2
        ;;
esac

# In CI a test that cannot run is a failure.
cannot() {
    if [ "${CI:-}" = true ]; then
        echo "the newest Mesa cannot be tested: $1" >&2
        exit 1
    fi
    echo "skipped, the newest Mesa cannot be tested: $1"
    exit 0
}
[ "$(uname -sm)" = "Linux x86_64" ] || cannot "this is $(uname -sm), and the driver is for Linux x86_64"
command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
    cannot "it is unpacked from Debian's packages, and there is no apt-get or no dpkg here"
folder=target/newest-mesa
# A mirror that is being updated can lack a file for some minutes.
for pause_s in 0 30 90; do
    sleep "$pause_s"
    if tests/peers/newest_mesa.sh "$folder"; then
        unpacked=true
        break
    fi
done
${unpacked:-false} || cannot "its packages cannot be downloaded, see above"

if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
fi
# A cache of its own: neither driver reads what the other compiled.
export MESA_SHADER_CACHE_DIR=$PWD/target/newest-mesa-shaders
mkdir -p "$MESA_SHADER_CACHE_DIR"
export GALLIVM_PERF=${GALLIVM_PERF:-nopt}
# The only width at which matrices work; on some processors the driver's default is 512.
export LP_NATIVE_VECTOR_WIDTH=256
export KYKLOS_REQUIRE_GPU=1 KYKLOS_REQUIRE_KERNELS=portable,subgroup-broadcast-8,cooperative-8x8
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/$folder/run

# As scripts/test.sh builds them: nothing is compiled twice.
tests=(cargo test --release --workspace --all-features --test)
run() { "${tests[@]}" wgpu_backend -- "$@"; }
suite() { "${tests[@]}" backends -- cooperative; }
"${tests[@]}" wgpu_backend --test backends --no-run

case $amount in
    --all)
        run
        suite
        exit
        ;;
    --smoke)
        export KYKLOS_TEST_MOST_HEAD_DIM=16
        for test in cooperative::every_f16_head_dim_equals_f64 cooperative-8x8-8-16x2::shares_rows \
            cooperative::a_probe_finds_agreement_and_times \
            cooperative::nan_reaches_exactly_the_gradients_of_the_pairs_that_have_it; do
            run "$test" --exact
        done
        exit
        ;;
esac
# This test compiles for a minute on one core, so it runs beside the others.
log=target/newest-mesa-cooperative.log
KYKLOS_TEST_MOST_HEAD_DIM=32 run cooperative::every_f16_head_dim_equals_f64 --exact >"$log" 2>&1 &
cooperative=$!
failed=0
KYKLOS_TEST_MOST_HEAD_DIM=64 run --skip portable:: --skip cooperative:: --skip large_heads || failed=1
KYKLOS_TEST_MOST_HEAD_DIM=32 run portable:: --skip large_heads || failed=1
for test in every_gradient_of_strided_tensors_equals_f64 nan_reaches_exactly_the_gradients_of_the_pairs_that_have_it; do
    run "cooperative::$test" --exact || failed=1
done
wait "$cooperative" || failed=1
suite || failed=1
cat "$log"
exit "$failed"
