#!/usr/bin/env bash
# Builds what tests/gpu/round.sh needs, with the kernels compiled in, into one folder that can be carried to a machine with
# an NVIDIA GPU: tests/gpu/pack.sh FOLDER. It needs nvcc (NVCC, CUDA_HOME or PATH; scripts/check-cuda.sh fetches one) and no GPU.
set -euo pipefail
case "${1:-}" in
    "" | -*)
        echo "usage: tests/gpu/pack.sh FOLDER: makes FOLDER, to be carried to a machine with an NVIDIA GPU" >&2
        exit 2
        ;;
esac
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
wheels=$PWD/target/cuda-toolkit/wheels/nvidia/cu13/bin/nvcc
if [ -z "${NVCC:-}${CUDA_HOME:-}" ] && ! command -v nvcc >/dev/null && [ -x "$wheels" ]; then
    export NVCC=$wheels
fi
# As cuda-backend/build.rs looks for it.
nvcc=${NVCC:-${CUDA_HOME:+$CUDA_HOME/bin/nvcc}}
"${nvcc:-nvcc}" --version 2>/dev/null | grep release ||
    echo "no nvcc: the programs compile their kernels on the machine with the GPU, which then needs NVRTC (libnvrtc)" >&2
cargo build --release -p kyklos-cli
built=$(cargo test --release -p kyklos-tests --test backends --test cuda --no-run --message-format=json)
for suite in backends cuda; do
    cp "$(grep -o "\"executable\":\"[^\"]*/deps/$suite-[0-9a-f]*\"" <<<"$built" | cut -d'"' -f4)" "$folder/$suite"
done
cp target/release/kyklos "$folder/kyklos"
cp tests/gpu/round.sh tests/gpu/ranks.sh tests/gpu/stages.sh tests/peers/torch_cuda.py clusters/h100-infiniband.toml "$folder/"
du -sh "$folder"
echo "next, on the machine with the GPU: $(basename "$folder")/round.sh --first"
