"""How a split transformer of diffusers runs: strategies, formats on the wire, and shares by pace."""

import copy

import pytest
import tiny_transformers as tiny
import torch
from split_models import all_raise, case, split

import kyklos
from kyklos._models.pace import Pace
from kyklos.diffusers import _attention, parallelize


@pytest.mark.parametrize("options", [{"strategy": "pipelined"}, {"strategy": "pass-q"}, {"mesh": "2x1", "strategy": "chunked"}], ids=str)
def test_strategies_are_exact(options):
    made = case("Wan")
    for got in split(made, 2, **options):
        assert made.error(got) <= made.tolerance


@pytest.mark.parametrize("wire", ["f16", "int8"])
def test_rounded_keys_and_values(wire):
    made = case("Flux")
    for got in split(made, 2, wire=wire, mesh="1x2"):
        assert made.tolerance < made.error(got) < 0.05 * made.exact.abs().max()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "fast"}, "strategy `fast` is not known"),
        ({"wire": "f8"}, "`f8` on the wire is not known"),
        ({"mesh": "2x1", "wire": "int8"}, "use a mesh with a ring"),
        ({"strategy": "tree", "wire": "f16"}, "f16 on the wire with strategy tree: this strategy sends no keys .* use a strategy that sends keys"),
        ({"shares": "fast"}, 'use "auto", or a number for each rank'),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options, says):
    models = case("Wan").copies(2)
    all_raise(2, lambda group: parallelize(models[group.rank], group, **options), says)


def paced(monkeypatch, token_ns):
    """Ranks whose layers are so fast, whatever they measure."""
    monkeypatch.setattr(Pace, "of", staticmethod(lambda *_: Pace(tuple(token_ns), (10**12,) * len(token_ns), (0,) * len(token_ns))))


def test_shares_by_pace_from_the_fourth_forward_on(monkeypatch):
    paced(monkeypatch, (1000, 3000))
    made, other = case("Wan"), tiny.Case(tiny.wan(), tiny.wan_inputs(frames=5))
    models = made.copies(2)

    def work(group):
        model = models[group.rank]
        with parallelize(model, group, shares="auto") as handle:
            seen = []
            for used in [made] * 5 + [other] * 2 + [made]:
                got = tiny.call(model, used.inputs)
                assert used.error(got) <= used.tolerance
                seen.append(handle.shares)
            return seen

    for seen in kyklos.run_local(2, work, device="cpu"):
        assert seen[:3] == [[1, 1]] * 3
        # The tokens of 3 and of 5 frames, with 35 in each.
        assert [sum(shares) for shares in seen[3:]] == [105, 105, 105, 175, 105]
        for first, second in seen[3:]:
            assert first == pytest.approx(3 * second, rel=0.1)


def test_shares_by_pace_as_measured():
    made = case("QwenImage, text masks")
    models = made.copies(2)

    def work(group):
        with parallelize(models[group.rank], group, shares="auto") as handle:
            for _ in range(5):
                got = tiny.call(models[group.rank], made.inputs)
                assert made.error(got) <= made.tolerance
            return handle.shares

    first, second = kyklos.run_local(2, work, device="cpu")
    assert first == second and sum(first) > 2 and min(first) >= 1


def test_forwards_that_fail_on_one_rank_leave_the_ranks_agreed_on_their_shares(monkeypatch):
    paced(monkeypatch, (1000, 3000))
    made = case("Wan")
    models = made.copies(2)
    attend = _attention.Split.attend

    def work(group):
        model = models[group.rank]
        with parallelize(model, group, shares="auto") as handle:
            for forward in range(1, 9):
                fails = forward in (1, 3, 4, 6)

                def failing(self, *args, _fails=fails):
                    if _fails and self.group.rank == 1:
                        raise kyklos.RequestError("no luck")
                    return attend(self, *args)

                monkeypatch.setattr(_attention.Split, "attend", failing) if group.rank == 0 else None
                ready = torch.ones(1, 8, 1, 8)
                group.attend(ready, ready, ready, layout="bshd", label=f"forward {forward}")
                if fails:
                    with pytest.raises(kyklos.RequestError):
                        tiny.call(model, made.inputs)
                else:
                    assert made.error(tiny.call(model, made.inputs)) <= made.tolerance
            return handle.shares

    first, second = kyklos.run_local(2, work, device="cpu")
    assert first == second and sum(first) == 105


def test_a_fault_in_a_block_of_one_rank_is_told():
    made = case("Wan")
    models = made.copies(2)

    def fails(*_):
        raise ZeroDivisionError("no luck")

    def work(group):
        model = models[group.rank]
        with parallelize(model, group):
            for block in (0, 1):
                hook = model.blocks[block].register_forward_hook(fails) if group.rank == 1 else None
                with pytest.raises((kyklos.RequestError, ZeroDivisionError), match="no luck"):
                    tiny.call(model, made.inputs)
                    # The last block has no attention after it: the other rank learns of it in its next forward.
                    tiny.call(model, made.inputs)
                if hook is not None:
                    hook.remove()
                assert made.error(tiny.call(model, made.inputs)) <= made.tolerance

    kyklos.run_local(2, work, device="cpu", deadline_s=30)


@pytest.mark.parametrize("other", [{"timestep": torch.tensor([701, 700])}, {"timestep": torch.tensor([700.2, 700.0])}], ids=str)
def test_another_time_on_one_rank_is_refused(other):
    made = case("Wan")
    models = made.copies(2)
    given = [{**made.inputs, "timestep": made.inputs["timestep"].to(other["timestep"].dtype)}, {**made.inputs, **other}]

    def run(group):
        with parallelize(models[group.rank], group):
            tiny.call(models[group.rank], given[group.rank])

    all_raise(2, run, "other values of timestep")


def test_an_input_of_more_axes_than_its_plan_is_refused():
    made = next(make() for name, make in tiny.CASES.items() if name.startswith("LTX"))
    models = made.copies(2)
    tokens = made.inputs["hidden_states"].shape[1]
    inputs = {**made.inputs, "timestep": torch.full((made.inputs["hidden_states"].shape[0], tokens, 1), 500.0)}

    def run(group):
        with parallelize(models[group.rank], group):
            tiny.call(models[group.rank], inputs)

    all_raise(2, run, "timestep has 3 axes, the plan expects 2")


def test_a_copy_keeps_the_shares_and_chooses_its_own(monkeypatch):
    paced(monkeypatch, (1000, 3000))
    made = case("Wan")
    models = made.copies(2)

    def work(group):
        model = models[group.rank]
        with parallelize(model, group, shares="auto") as handle:
            for _ in range(4):
                tiny.call(model, made.inputs)
            twin = copy.deepcopy(model)
            assert made.error(tiny.call(twin, made.inputs)) <= made.tolerance
            assert made.error(tiny.call(model, made.inputs)) <= made.tolerance
            return handle.shares

    for shares in kyklos.run_local(2, work, device="cpu"):
        assert sum(shares) == 105 and shares[0] > 2 * shares[1]


def test_a_split_that_makes_a_transformer_slower_is_told(monkeypatch):
    monkeypatch.setattr(Pace, "of", staticmethod(lambda *_: Pace((1, 1), (10**15, 10**15), (0,) * 2)))
    with pytest.warns(UserWarning, match="a pass over 105 tokens takes .* on 2 ranks, and would take about .* on rank 0 alone"):
        models = case("Wan").copies(2)

        def work(group):
            with parallelize(models[group.rank], group, shares="auto"):
                for _ in range(7):
                    tiny.call(models[group.rank], case("Wan").inputs)

        kyklos.run_local(2, work, device="cpu")
