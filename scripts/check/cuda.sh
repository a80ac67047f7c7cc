#!/usr/bin/env bash
# Compiles the CUDA kernels with NVIDIA's own compilers on a machine without a GPU. Fails on warnings, spills, stack, more
# registers than cuda-backend/tests/compilers/budgets.txt allows, kernels for Hopper whose products are serialised or whose
# registers are not those that setmaxnreg counts on, and reads that wait for each other.
#   scripts/check/cuda.sh           nvcc through the crate's build.rs, for every architecture; NVRTC; NVRTC of CUDA 12, for
#                                   older drivers; then scripts/check/nccl.sh, which holds the loader of NCCL to NVIDIA's
#                                   library: a part of scripts/test-all.sh, five minutes on two cores
#   scripts/check/cuda.sh --bless   the same, and writes the registers to that table
#   scripts/check/cuda.sh --smoke   what .ci/run does in less than a minute: NVRTC through the crate, which gets all kernels,
#                                   and NVRTC by itself for the machine code of the small kernels and of those for attention
#                                   in bf16, for the oldest and the newest architecture; the controls of these checks
# The compilers come from PyPI as wheels (about 300 MB, once) and stay in target/.
set -euo pipefail
cd "$(dirname "$0")/../.."

# 13.0: the 580 driver refuses PTX of a newer one.
wheels=(
    nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc==13.0.88
    nvidia-cuda-nvdisasm==13.5.37
)
# For drivers that load nothing of CUDA 13. In a folder of its own: both have libraries of the same names.
older=nvidia-cuda-nvrtc-cu12==12.9.86
folder=$PWD/target/cuda-toolkit
smoke=false
[ "${1:-}" = --smoke ] && smoke=true

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "not run: these wheels are for Linux on x86-64, this is $(uname -sm)"
    exit 0
fi
# install FOLDER WHEEL...: where they are not yet.
install() {
    local into=$folder/$1 start=$SECONDS
    shift
    [ "$(cat "$into/installed" 2>/dev/null)" != "$*" ] || return 0
    rm -rf "$into"
    mkdir -p "$into"
    [ -x "$folder/venv/bin/pip" ] || scripts/tools/make-venv.sh "$folder/venv"
    # One command: a second one into the same folder would not merge the wheels.
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$into" "$@"
    echo "$*" >"$into/installed"
    echo "$into: installed in $((SECONDS - start)) s"
}
install wheels "${wheels[@]}"
toolkit=$folder/wheels/nvidia/cu13
check=cuda-backend/tests/compilers/check.py
field() { grep -o "\"$1\":\"[^\"]*\"" | tail -n 1 | cut -d'"' -f4; }
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

if $smoke; then
    # The program that scripts/test.sh has built. Built for this package alone it would have other features.
    program=$(cargo test --release -q --workspace --all-features --lib --no-run --message-format=json |
        grep '/cuda-backend#' | field executable)
    LD_LIBRARY_PATH=$toolkit/lib "$program" -q --include-ignored nvrtc &
    python3 $check "$toolkit" --control
    python3 $check "$toolkit" --smoke
    wait $!
    exit
fi
install older "$older"

# All inputs of the check. When they have passed unchanged, nothing is compiled again.
passed=$folder/passed
state=$(find cuda-backend/{src,kernels,tests/compilers,architectures.txt,build.rs,Cargo.toml} scripts/check/cuda.sh scripts/check/nccl.sh Cargo.lock -type f -not -path '*/__pycache__/*' -print0 |
    sort -z | xargs -0 sha256sum | sha256sum)
if [ $# = 0 ] && [ "$(cat "$passed" 2>/dev/null)" = "$state" ]; then
    echo "unchanged since it passed; after rm $passed it runs again"
    exit 0
fi

# Builds the crate's tests, and prints cargo's messages.
build() { "$@" cargo test --release -q -p kyklos-cuda --lib --no-run --message-format=json; }

# NVRTC, as the crate calls it, takes half a minute of a core. It starts first, from a copy, because cargo links the program again.
cp "$(build | field executable)" "$folder/run-time"
LD_LIBRARY_PATH=$toolkit/lib "$folder/run-time" -q --include-ignored nvrtc &
python3 $check "$toolkit" --control
# The crate's other way to compile the kernels: nvcc, from build.rs.
images=$(build env NVCC="$toolkit/bin/nvcc" | grep '"build-script-executed".*/cuda-backend#' | field out_dir)
python3 $check "$toolkit" "$folder/older/nvidia/cuda_nvrtc/lib" "$images" "$@"
NVCC=$toolkit/bin/nvcc cargo test --release -q -p kyklos-cuda --lib
wait $!
scripts/check/nccl.sh
echo "$state" >"$passed"
