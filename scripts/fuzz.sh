#!/usr/bin/env bash
# Runs the fuzz targets with coverage. Needs cargo-fuzz and a C++ compiler, and a nightly compiler or permission to use the
# installed one as if it were (RUSTC_BOOTSTRAP=1): the sanitizers' flags are unstable.
#   scripts/fuzz.sh [SECONDS [TARGET…]]   each target for so long (60 s), all of them unless some are named
#   scripts/fuzz.sh --keep [TARGET…]      adds small inputs that reached new code to fuzz/corpus
# New inputs are under target/fuzz/corpus. An input that breaks a target is under fuzz/artifacts, with the command that
# repeats it. FUZZ_SANITIZER=none turns AddressSanitizer off.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
export CARGO_INCREMENTAL=0 CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none}

fail() {
    echo "fuzz: $*" >&2
    exit 1
}

if cargo +nightly fuzz --version >/dev/null 2>&1; then
    cargo=(cargo +nightly)
elif [ "${RUSTC_BOOTSTRAP-}" = 1 ] && cargo fuzz --version >/dev/null 2>&1; then
    cargo=(cargo)
else
    fail "there is no cargo-fuzz for a nightly compiler: rustup toolchain install nightly (or set RUSTC_BOOTSTRAP=1), then cargo install cargo-fuzz"
fi

fuzz() {
    local verb=$1 target=$2
    shift 2
    "${cargo[@]}" fuzz "$verb" --sanitizer "${FUZZ_SANITIZER:-address}" --target-dir ../target/fuzz "$target" "$@"
}

# libFuzzer's own limits: an input's bytes, a call's seconds, the process' MiB.
limits=(-max_len=65536 -timeout=20 -rss_limit_mb=2048)

keep=
if [ "${1-}" = --keep ]; then
    keep=yes
else
    seconds=${1:-60}
fi
[ $# = 0 ] || shift
targets=("$@")
[ $# != 0 ] || mapfile -t targets < <("${cargo[@]}" fuzz list)

# Inputs with keys are made anew each time, and none of them is kept.
for target in "${targets[@]}"; do
    found=../target/fuzz/corpus/$target
    mkdir -p "$found" "corpus/$target"
    if [ -n "$keep" ]; then
        case $target in identity | invitation | token) continue ;; esac
        fuzz run "$target" "corpus/$target" "$found" -- -merge=1 -use_counters=0 -max_len=512 "${limits[@]:1}"
    else
        fuzz run "$target" "$found" "corpus/$target" -- "-max_total_time=$seconds" "${limits[@]}"
    fi
done
