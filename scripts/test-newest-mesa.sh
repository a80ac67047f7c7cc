#!/usr/bin/env bash
# Runs the tests of the wgpu backend over the newest Mesa's software Vulkan, which tests/peers/newest_mesa.sh unpacks
# into target/newest-mesa (once; remove that folder for a newer one): what Debian 12's own driver lacks is there,
# matrices of 8x8x8 from f16 to f32, and subgroups without a detour.
#   scripts/test-newest-mesa.sh          a choice of them: some minutes on two cores where nothing was compiled yet
#   scripts/test-newest-mesa.sh --all    every one of them: the better part of an hour
#
# Without --all it is kept short, because this driver's compiler is slow and all but seconds of this stage are compiling
# (the driver keeps what it compiled in target/newest-mesa-shaders). Processor seconds on an EPYC core: 18 for a portable
# kernel of head dim 64, 7 for one with subgroups, 22 for matrices and head dim 16, 65 for 32, 172 for 128. Left out:
# - heads of more than 64, and of more than 32 for the portable kernel: scripts/test.sh passes them on the installed
#   driver, where they compile in seconds, and what changes with the head dim is how often loops run;
# - matrix units on all but the masks, rows and keys of one test in f16, heads of 16 and 32. Everything else of these
#   tests takes the portable kernel on such a device too, or is matrices at 64 and more.
#
# Fails where a kernel is not offered (portable, subgroups of 4, 8 and 16, matrices) and where no test ran.
set -euo pipefail
cd "$(dirname "$0")/.."

all=false
case ${1:-} in
    --all) all=true ;;
    '') ;;
    *)
        echo "unknown argument $1: there is --all" >&2
        exit 2
        ;;
esac

# CI must not pass what it did not test.
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
# A mirror that is being updated lacks a file for some minutes.
for pause_s in 0 30 90; do
    sleep "$pause_s"
    if tests/peers/newest_mesa.sh "$folder"; then
        unpacked=true
        break
    fi
done
${unpacked:-false} || cannot "its packages could not be had, see above"

if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
fi
# Apart from the installed driver's: neither reads what the other compiled.
export MESA_SHADER_CACHE_DIR=$PWD/target/newest-mesa-shaders
mkdir -p "$MESA_SHADER_CACHE_DIR"
# The only width at which matrices work; on some processors the driver would take 512 by itself.
export LP_NATIVE_VECTOR_WIDTH=256
export KYKLOS_REQUIRE_GPU=1 KYKLOS_REQUIRE_KERNELS=portable,subgroup-broadcast-8,cooperative-8x8
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/$folder/run

# As scripts/test.sh builds them: nothing is compiled twice.
tests=(cargo test --release --workspace --all-features --test wgpu_backend)
run() { "${tests[@]}" -- "$@"; }
"${tests[@]}" --no-run

if $all; then
    run
    exit
fi
# One test that compiles for a minute on one core: beside the others.
log=target/newest-mesa-cooperative.log
KYKLOS_TEST_MOST_HEAD_DIM=32 run cooperative::every_f16_head_dim_equals_f64 --exact >"$log" 2>&1 &
cooperative=$!
failed=0
KYKLOS_TEST_MOST_HEAD_DIM=64 run --skip portable:: --skip cooperative:: --skip large_heads || failed=1
KYKLOS_TEST_MOST_HEAD_DIM=32 run portable:: --skip large_heads || failed=1
wait "$cooperative" || failed=1
cat "$log"
exit "$failed"
