"""The first examples of docs/python/start.md run as printed."""

import re
import subprocess
import sys
from pathlib import Path

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
