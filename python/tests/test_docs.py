"""The first examples of docs/python/start.md run as printed, and the program of docs/python/pictures.md in a short form."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "python" / "start.md"


def blocks(section):
    text = DOCS.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_first_example_prints_what_it_says(tmp_path):
    script = tmp_path / "first.py"
    script.write_text(blocks("First steps")[0], encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[(1, 300, 8, 64), (1, 212, 8, 64)]"


def test_the_example_for_several_processes(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(blocks("First steps")[1], encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 100, 4, 64])" in done.stdout and "torch.Size([1, 101, 4, 64])" in done.stdout


@pytest.mark.slow
def test_the_pictures_of_all_strategies(tmp_path):
    image = pytest.importorskip("PIL.Image")
    from test_transformers_processes import run_example

    script, folder = DOCS.parents[2] / "python" / "examples" / "pictures.py", tmp_path / "pictures"
    out = run_example(tmp_path, str(script), str(folder), "--train-steps", "3", "--steps", "2", "--ranks", "2", "4", seconds=500)
    assert (folder / "table.md").read_text(encoding="utf-8").rstrip("\n") in out
    assert (folder / "pictures.png").stat().st_size < 300_000
    with image.open(folder / "pictures.png") as sheet:
        assert sheet.width > 1000 and len(sheet.convert("RGB").getcolors(1 << 20)) > 60
    rows = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert len({row["strategy"] for row in rows if "mesh" in row}) == 12
    largest = {wire: [row["largest"] for row in rows if row["wire"] == wire] for wire in ("same", "f16", "int8", "a fault")}
    assert [len(found) for found in largest.values()] == [13, 9, 9, 2]
    # Rounding of float32, of f16 and of int8; and ranks that do not see each other.
    assert max(largest["same"]) < 0.01
    assert max(largest["f16"]) < min(largest["int8"]) and 10 * max(largest["same"]) < min(largest["int8"])
    assert max(largest["int8"]) < min(largest["a fault"])
    assert all(row["sent_kib"] > 0 and row["attention_kib"] > 0 and row["step_ms"] > 0 for row in rows if "mesh" in row)
