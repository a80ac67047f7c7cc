#!/bin/sh
# Installs the peers that cpu_attention.py measures into a virtual environment, by name, from PyPI.
#   tests/peers/setup.sh [folder]      (default: target/peers; about 1.5 GB for PyTorch's CUDA-built wheel)
# PyPI has PyTorch for CUDA only. Its NVIDIA packages (several GB more) are left out; cpu_attention.py --stand-ins
# makes the libraries that it would look for, empty, so that it can be imported and used on the CPU. Needs a C
# compiler and readelf (binutils).
set -eu
folder=${1:-target/peers}
here=$(dirname "$0")
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --no-deps torch
"$folder/bin/pip" install --quiet numpy onnx onnxruntime \
    sympy networkx jinja2 fsspec filelock typing-extensions
"$folder/bin/python" "$here/cpu_attention.py" --stand-ins
"$folder/bin/python" -c 'import torch, onnxruntime; print("torch", torch.__version__, "onnxruntime", onnxruntime.__version__)'
