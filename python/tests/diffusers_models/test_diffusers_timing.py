"""The table of a pipeline's times."""

import types

import pytest
import torch
from split_models import case

import kyklos
from kyklos.diffusers import parallelize, timed
from kyklos.diffusers import _timing


class Vae(torch.nn.Module):
    """Decodes through a part of its own."""

    def __init__(self):
        super().__init__()
        self.decoder = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.decoder(x)

    def decode(self, x):
        return self(x)


def pipeline(transformer):
    return types.SimpleNamespace(components={"transformer": transformer, "vae": Vae(), "scheduler": object(), "tokenizer": None})


def test_the_parts_of_all_ranks():
    made = case("Wan")
    models = made.copies(2)

    def work(group):
        pipe = pipeline(models[group.rank])
        with parallelize(models[group.rank], group):
            before = vars(models[group.rank]).get("forward")
            with timed(pipe, group) as times:
                for _ in range(3):
                    with torch.no_grad():
                        models[group.rank](**made.inputs)
                pipe.components["vae"].decode(torch.zeros(1, 2))
            # Nothing is left behind, and the split model still runs.
            assert vars(models[group.rank]).get("forward") is before and "decode" not in pipe.components["vae"].__dict__
            models[group.rank](**made.inputs)
        # The forward within decode() is not counted twice.
        assert {name: len(part.calls_s) for name, part in times.parts.items()} == {"transformer": 3, "vae decode": 1}
        assert sum(part.total_s for part in times.parts.values()) <= times.total_s and times.process_mib > 10
        return str(times)

    first, second = kyklos.run_local(2, work, device="cpu")
    assert first == second
    lines = first.splitlines()
    assert lines[0].split() == ["rank", "0", "rank", "1"]
    names = [line[:40] for line in lines[1:]]
    for name in ("transformer: first call (s)", "transformer: 2 more, median (s)", "vae decode: all (s)", "the rest (s)", "process, most memory (MiB)"):
        assert any(line.startswith(name) for line in names), name
    assert all(float(number) >= 0 for line in lines[1:] for number in line.split()[-2:])


def test_times_are_those_of_the_clock(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: next(clock))
    with kyklos.Group.local(1, device="cpu")[0] as group:
        pipe = pipeline(torch.nn.Linear(2, 2))
        with timed(pipe, group) as times:
            pipe.components["transformer"](torch.zeros(1, 2))
    assert (times.parts["transformer"].calls_s, times.total_s) == ([2.0], 10.0)
    assert "the rest (s)" in str(times) and str(times).split("the rest (s)")[1].split()[0] == "8.000"


def test_an_error_leaves_the_pipeline_as_it_was():
    pipe = pipeline(torch.nn.Linear(2, 2))
    with kyklos.Group.local(1, device="cpu")[0] as group, pytest.raises(ZeroDivisionError):
        with timed(pipe, group) as times:
            1 / 0
    assert "forward" not in pipe.components["transformer"].__dict__ and str(times) == "not measured yet"
