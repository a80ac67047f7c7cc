"""``python -m kyklos`` and the version, on an installed package."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kyklos
import kyklos.__main__ as selftest


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "kyklos", *arguments], capture_output=True, text=True, timeout=300)


def test_the_cores_are_right():
    done = run("cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"kyklos {kyklos.__version__}, Python ")
    assert re.search(r"^cpu +OK +.*: largest error \d\.\de-0[67], ", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("\nOK\n")


def test_every_device_of_the_machine_is_tested_or_said_to_be_missing():
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ["cpu", "wgpu", "cuda", "torch"]:
        assert re.search(rf"^{name}(:\d+)? +(OK|not used) ", done.stdout, re.MULTILINE), done.stdout


def test_a_device_that_cannot_be_used_is_a_failure_with_its_reason():
    done = run("cpu", "wgpu:99", "abacus")
    assert done.returncode == 1
    assert re.search(r"^cpu +OK ", done.stdout, re.MULTILINE)
    assert re.search(r"^wgpu:99 +FAILED +.*99", done.stdout, re.MULTILINE)
    assert re.search(r'^abacus +FAILED +device "abacus" is not known', done.stdout, re.MULTILINE)
    assert "NOT OK" in done.stdout


@pytest.mark.parametrize("fault", [1e-3, np.nan])
def test_wrong_results_are_found(monkeypatch, capsys, fault):
    def faulty(size, function, *, device):
        values = kyklos.run_local(size, function, device=device)
        values[1][1][0, -1, -1, -1] += fault
        return values

    assert selftest.main(["cpu"]) == 0
    monkeypatch.setattr(selftest, "run_local", faulty)
    assert selftest.main(["cpu"]) == 1
    assert "cpu      WRONG" in capsys.readouterr().out


def test_without_numpy_the_test_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert selftest.main(["cpu"]) == 2
    assert "pip install numpy" in capsys.readouterr().err


def test_the_version_is_that_of_the_installed_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+", kyklos.__version__)
    assert run("--version").stdout == f"kyklos {kyklos.__version__}\n"
    try:
        installed = importlib.metadata.version("kyklos")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is a folder, not installed")
    assert kyklos.__version__ == installed


def test_the_example_of_the_readme_prints_what_it_says(tmp_path):
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    script = tmp_path / "first.py"
    script.write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[(1, 300, 8, 64), (1, 212, 8, 64)]\n", done.stderr
