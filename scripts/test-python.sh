#!/usr/bin/env bash
# The Python package: builds it and runs its tests in a virtual environment of its own.
#   scripts/test-python.sh           the wheel, as pip builds it, with PyTorch, transformers and diffusers (3 GB, half an hour)
#   scripts/test-python.sh --smoke   the extension module with NumPy alone: what .ci/run does
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none}
smoke=false
[ "${1:-}" = --smoke ] && smoke=true

folder=target/python
$smoke && folder=target/python-smoke
[ -x "$folder/bin/pip" ] || scripts/tools/make-venv.sh "$folder"
python=$PWD/$folder/bin/python
# The GPUs of the tests (gpus/gpu_processes.py): the libraries that tests of the CUDA backend use.
KYKLOS_FAKE_LIBRARIES=$(CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0} cargo run -q --release -p kyklos-fake-cuda --example folder)
export KYKLOS_FAKE_LIBRARIES

if $smoke; then
    "$python" -m pip install --quiet --disable-pip-version-check numpy pytest
    # What ComfyUI's node pack does without PyTorch.
    (cd comfyui/tests && "$python" -m pytest -q -p no:cacheprovider --import-mode=append test_nodes.py)
    # With the features of scripts/test.sh, after which only the package itself is compiled: 13 s instead of 80 to 150.
    CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0} cargo build --release --workspace --all-features --lib --tests
    # The package as a wheel has it: its Python code beside the extension module.
    package=$(mktemp -d)
    trap 'rm -rf "$package"' EXIT
    cp -r python/kyklos "$package/kyklos"
    rm -f "$package"/kyklos/_kyklos.*.so
    cp target/release/lib_kyklos.so "$package/kyklos/_kyklos.abi3.so"
    PYTHONPATH=$package "$python" -m pytest -q -p no:cacheprovider python/tests/test_arrays.py python/tests/test_attend.py \
        python/tests/test_backward.py python/tests/test_groups.py python/tests/test_shares.py python/tests/installed python/tests/gpus
    exit
fi

# PyPI's PyTorch is built for CUDA; tests/peers/setup.sh installs it without the NVIDIA packages.
"$python" -c 'import torch' 2>/dev/null || tests/peers/setup.sh "$folder"
"$python" -m pip install --quiet --disable-pip-version-check pytest mypy
# For the tests of adapters: transformers 5.24 wants a peft that is not published yet (0.22).
"$python" -m pip install --quiet --disable-pip-version-check --no-deps 'transformers>=5.20,<5.24' 'diffusers>=0.42,<0.43'
"$python" -m pip install --quiet --disable-pip-version-check 'huggingface_hub>=1' safetensors tokenizers regex pyyaml tqdm \
    requests packaging pillow importlib_metadata typer psutil
# Adapters and offloading. Their lists of dependencies name PyTorch, and with it its NVIDIA packages.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps 'peft==0.21.2' 'accelerate>=1.15,<2'
CARGO_TARGET_DIR=$PWD/target "$python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps ./python
"$python" -m mypy --ignore-missing-imports --follow-imports=silent python/kyklos
scripts/check/types.sh python
# Not in python/, whose kyklos/ has no extension module: Python looks into the current folder first. Threads of PyTorch and of each rank
# share the cores.
run() { (cd python/tests && OMP_NUM_THREADS=1 "$python" -m pytest -q -p no:cacheprovider --import-mode=append "${@}"); }
run "${@}"
[ $# = 0 ] || exit 0
# ComfyUI's node pack, without ComfyUI. If KYKLOS_COMFYUI is the folder of one whose requirements are installed, it runs in that too.
"$python" -m pip install --quiet --disable-pip-version-check 'segno>=1.6,<2'
(cd comfyui/tests && OMP_NUM_THREADS=1 "$python" -m pytest -q -p no:cacheprovider --import-mode=append .)
"$python" -m mypy --ignore-missing-imports --follow-imports=silent comfyui/*.py
# The same calls, operator and models on PyTorch as a device; and the contract of backends, with an extension module that has its suite.
KYKLOS_TEST_DEVICE=torch:cpu run test_attend.py test_arrays.py test_backward.py torch_operator transformers_models transformers_families diffusers_models diffusers_families
cargo build --release -p kyklos-python --features suite
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
cp -r python/kyklos "$package/kyklos"
rm -f "$package"/kyklos/_kyklos.*.so
cp target/release/lib_kyklos.so "$package/kyklos/_kyklos.abi3.so"
KYKLOS_REQUIRE_CLAIMS=1 PYTHONPATH=$package run torch_device
