#!/usr/bin/env bash
# Holds what cuda-backend/src/nccl/ takes for granted of NCCL to NVIDIA's own library and header, without a GPU: the oldest version
# that works and a new one. The header is compiled with tests/compilers/nccl_abi.cpp; the library is loaded, and asked for names,
# versions and texts. The wheels come from PyPI (520 MB, once) and stay in target/, as do CUDA's headers, which
# scripts/check/cuda.sh fetches.
set -euo pipefail
cd "$(dirname "$0")/../.."

folder=$PWD/target/cuda-toolkit
headers=$folder/wheels/nvidia/cu13/include
versions=(cu12==2.18.3 cu13==2.32.3)

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "not run: these wheels are for Linux on x86-64, this is $(uname -sm)"
    exit 0
fi
if [ ! -e "$headers/cuda_runtime.h" ]; then
    echo "CUDA's headers are not in $headers: scripts/check/cuda.sh fetches them" >&2
    exit 1
fi
program=$(cargo test --release -q -p kyklos-cuda --lib --no-run --message-format=json |
    grep -o '"executable":"[^"]*"' | tail -n 1 | cut -d'"' -f4)
for version in "${versions[@]}"; do
    nccl=$folder/nccl-${version/==/-}
    if [ ! -e "$nccl/done" ]; then
        rm -rf "$nccl"
        "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$nccl" "nvidia-nccl-$version"
        touch "$nccl/done"
    fi
    library=$nccl/nvidia/nccl
    "${CXX:-g++}" -std=c++17 -fsyntax-only -Wall -I "$headers" -isystem "$library/include" \
        cuda-backend/tests/compilers/nccl_abi.cpp
    LD_LIBRARY_PATH=$library/lib "$program" -q --include-ignored nccl::
    echo "NCCL $version: its header and its library are what the loader takes for granted"
done
