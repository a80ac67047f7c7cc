#!/usr/bin/env bash
# Runs the training in an environment of its own; options go to train.py. The first run fetches PyTorch (1.5 GB) and compiles the
# extension module, 10 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${KYKLOS_VENV:-target/training}
[ -x "$folder/bin/pip" ] || scripts/tools/make-venv.sh "$folder"
python=$PWD/$folder/bin/python
"$python" -c 'import torch' 2>/dev/null || tests/peers/setup.sh "$folder"
# matplotlib draws the picture: nothing in the repository draws curves.
"$python" -c 'import matplotlib' 2>/dev/null || "$python" -m pip install --quiet --disable-pip-version-check matplotlib
# The package of this checkout: after a change it is built again.
CARGO_PROFILE_RELEASE_DEBUG=${CARGO_PROFILE_RELEASE_DEBUG:-none} CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target} \
    "$python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps ./python
# Threads of PyTorch and of the ranks share the cores.
OMP_NUM_THREADS=1 exec "$python" -u demos/training/train.py "$@"
