#!/usr/bin/env bash
# Compiles the CUDA kernels with NVIDIA's own compilers, for every architecture, on a machine without a GPU. Fails on
# spills, stack, more registers than cuda-backend/tests/compilers/budgets.txt allows (--bless writes that table), and
# kernels for Hopper whose products are serialised or whose machine code has no wgmma or TMA in it.
# The compilers come from PyPI as wheels (about 200 MB, once) and stay in target/.
set -euo pipefail
cd "$(dirname "$0")/.."

# 13.0: the 580 driver refuses PTX of a newer one.
wheels=(
    nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc==13.0.88
    nvidia-cuda-nvdisasm==13.5.37
)
folder=$PWD/target/cuda-toolkit
stamp=$folder/installed

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "not run: these wheels are for Linux on x86-64, this is $(uname -sm)"
    exit 0
fi
if [ "$(cat "$stamp" 2>/dev/null)" != "${wheels[*]}" ]; then
    start=$SECONDS
    rm -rf "$folder"
    mkdir -p "$folder"
    # A venv of its own: the system's Python may have no pip, or refuse to install.
    if ! python3 -c 'import ensurepip' 2>/dev/null && command -v apt-get >/dev/null; then
        echo "installing python3-venv"
        as_root=()
        [ "$(id -u)" = 0 ] || as_root=(sudo)
        "${as_root[@]}" apt-get update -qq
        DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends python3-venv
    fi
    python3 -m venv "$folder/venv"
    # One command: a second one into the same folder would not merge the wheels.
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$folder/wheels" "${wheels[@]}"
    echo "${wheels[*]}" >"$stamp"
    echo "compilers installed in $((SECONDS - start)) s"
fi
toolkit=$folder/wheels/nvidia/cu13
python3 cuda-backend/tests/compilers/check.py "$toolkit" --control
python3 cuda-backend/tests/compilers/check.py "$toolkit" "$@"
# The crate's own ways to the same code: nvcc while it is built, and NVRTC while it runs.
NVCC=$toolkit/bin/nvcc LD_LIBRARY_PATH=$toolkit/lib cargo test --release -q -p kyklos-cuda --lib -- --include-ignored
