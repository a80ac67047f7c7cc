"""Ways to compute a forward of a split transformer: each is exact, and the fastest stays."""

import copy

import pytest
import tiny_joint
import tiny_single
import tiny_transformers as tiny
import torch
from split_models import case

import kyklos
import kyklos.torch
from kyklos.diffusers import parallelize
from kyklos.diffusers._ways import calls, whole
from kyklos.diffusers._ways.choice import Estimate, Trial, Way


def force(handle, way):
    """Lets the forwards that follow run this way."""
    state = handle._split.shares
    for shapes in state.trials:
        state.trials[shapes] = Trial([Estimate(way, 0.0, tried_s=[0.0] * 4)])


def chosen(handle, run):
    """Runs forwards until a way is chosen."""
    state = handle._split.shares
    for _ in range(40):
        run()
        if state.trial is not None and state.trial.is_over:
            return state.trial
    raise AssertionError(f"no way is chosen:\n{state.trial}")


def with_guidance(name):
    """Two cases that differ as the two calls of a step do: in the prompt."""
    made = case(name)
    torch.manual_seed(5)
    prompt = torch.randn_like(made.inputs["encoder_hidden_states"])
    return made, tiny.Case(made.model, {**made.inputs, "encoder_hidden_states": prompt})


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["Wan", "Flux", "QwenImage, text masks", "SD 3.5", "Z-Image"])
def test_every_way_is_exact(name, size):
    made = {**tiny_joint.CASES, **tiny_single.CASES, **tiny.CASES}[name]()
    models = made.copies(size)

    def work(group):
        model = models[group.rank]
        with parallelize(model, group) as handle:

            def run():
                got = tiny.call(model, made.inputs)
                assert made.error(got) <= made.tolerance, handle.way

            ways = [estimate.way for estimate in chosen(handle, run).estimates]
            for way in ways:
                force(handle, way)
                run()
                run()
                assert handle.way == way.name or handle._split.shares.trial.estimates[0].failed
            return [way.name for way in ways]

    first, *others = kyklos.run_local(size, work, device="cpu")
    assert all(other == first for other in others)
    # The heads of some models are fewer than three.
    for kind in ["alone", "ring", "ulysses"] if size == 2 else ["alone", "ring"]:
        assert any(kind in name for name in first)


def test_the_calls_of_a_step_run_on_two_ranks_at_a_time():
    pair = with_guidance("Wan")
    models = pair[0].copies(2)

    def work(group):
        model = models[group.rank]
        computed = []
        model.blocks[0].register_forward_hook(lambda *_: computed.append(1))
        with parallelize(model, group) as handle:

            def step():
                for made in pair:
                    assert made.error(tiny.call(model, made.inputs)) <= made.tolerance, handle.way

            ways = [estimate.way for estimate in chosen(handle, step).estimates]
            force(handle, next(way for way in ways if way.pair is not None))
            # The first step shows its calls, the second one confirms that they are predicted rightly.
            step()
            step()
            computed.clear()
            for _ in range(3):
                step()
            return len(computed)

    # Of six calls, each rank has computed three whole ones.
    assert kyklos.run_local(2, work, device="cpu") == [3, 3]


def test_prompts_in_one_buffer_are_exact():
    """The second prompt is written over the first one."""
    pair = with_guidance("Wan")
    models = pair[0].copies(2)

    def work(group):
        model = models[group.rank]
        buffer = torch.empty_like(pair[0].inputs["encoder_hidden_states"])
        with parallelize(model, group) as handle:

            def step():
                for made in pair:
                    buffer.copy_(made.inputs["encoder_hidden_states"])
                    got = tiny.call(model, {**made.inputs, "encoder_hidden_states": buffer})
                    assert made.error(got) <= made.tolerance, handle.way

            chosen(handle, step)
            force(handle, Way("pair", pair=(0, 1)))
            for _ in range(5):
                step()

    kyklos.run_local(2, work, device="cpu")


def test_a_model_that_changes_between_the_calls_of_a_step_is_exact():
    """As guidance by skipped layers does, by a hook that looks at a flag of its own."""
    first, second = with_guidance("Wan")
    models = first.copies(2)
    plain = copy.deepcopy(first.model)
    flag = [False]
    for model in (plain, *models):
        model.blocks[0].register_forward_hook(lambda module, args, output: output * 1.5 if flag[0] else output)
    flag[0] = True
    skipped = tiny.Case(plain, second.inputs)
    flag[0] = False

    def work(group):
        model, own = models[group.rank], [False]
        model.blocks[0]._forward_hooks.clear()
        model.blocks[0].register_forward_hook(lambda module, args, output: output * 1.5 if own[0] else output)
        with parallelize(model, group) as handle:

            def step():
                for made, own[0] in ((first, False), (skipped, True)):
                    assert made.error(tiny.call(model, made.inputs)) <= made.tolerance, handle.way

            chosen(handle, step)
            force(handle, Way("pair", pair=(0, 1)))
            for _ in range(5):
                step()
            return handle._split.shares.trial.estimates[0].failed

    assert kyklos.run_local(2, work, device="cpu") == [True, True]


def test_an_argument_that_comes_later_is_confirmed_again():
    """A list of as many tensors as the batch has entries, which no entry has apart."""
    made = case("Flux")
    later = tiny.Case(made.model, {**made.inputs, "controlnet_single_block_samples": [0.5 * torch.randn(1, 35, 32) for _ in range(2)]})
    models = made.copies(2)

    def work(group):
        model = models[group.rank]
        with parallelize(model, group) as handle:
            chosen(handle, lambda: tiny.call(model, made.inputs))
            force(handle, Way("halves", entries=(1, 1)))
            for used in [made] * 3 + [later] * 3 + [made]:
                assert used.error(tiny.call(model, used.inputs)) <= used.tolerance

    kyklos.run_local(2, work, device="cpu")


def test_a_rank_without_the_memory_for_a_whole_forward_is_left_to_the_split(monkeypatch):
    made = case("Wan")
    models = made.copies(2)
    own = whole.Whole._own

    def lacks(self, calls):
        if calls[0][0] == self._split.group.rank:
            raise torch.OutOfMemoryError("no memory")
        return own(self, calls)

    monkeypatch.setattr(whole.Whole, "_own", lacks)

    def work(group):
        model = models[group.rank]
        with parallelize(model, group) as handle:

            def run():
                assert made.error(tiny.call(model, made.inputs)) <= made.tolerance

            return str(chosen(handle, run))

    first, second = kyklos.run_local(2, work, device="cpu")
    assert first == second and "failed" in first and any("<- chosen" in line and "on" in line.split() for line in first.splitlines())


@pytest.mark.parametrize("odd", ["another prompt", "no second call", "three calls", "another first call"])
def test_calls_that_do_not_come_as_predicted_are_exact(odd):
    first, second = with_guidance("Wan")
    torch.manual_seed(6)
    third = tiny.Case(first.model, {**first.inputs, "encoder_hidden_states": torch.randn(2, 12, 16)})
    later = tiny.Case(first.model, {**first.inputs, "timestep": torch.tensor([300, 300])})
    models = first.copies(2)
    odd_calls = {
        "another prompt": [first, third, first, third],
        "no second call": [later, first, later, first, later],
        "three calls": [first, second, third, first, second, third],
        "another first call": [third, second, third, second],
    }[odd]

    def work(group):
        model = models[group.rank]
        with parallelize(model, group) as handle:

            def run(made):
                assert made.error(tiny.call(model, made.inputs)) <= made.tolerance, handle.way

            chosen(handle, lambda: [run(first), run(second)])
            force(handle, Way("pair", pair=(1, 0)))
            for made in [first, second] * 4 + odd_calls + [first, second] * 3:
                run(made)

    kyklos.run_local(2, work, device="cpu")


def test_entries_that_are_cut_wrongly_are_found(monkeypatch):
    made = case("Wan")
    models = made.copies(2)
    right = calls.entries_of
    monkeypatch.setattr(whole, "entries_of", lambda inputs, first, end, batch: right(inputs, 0, end - first, batch))

    def work(group):
        model = models[group.rank]
        with parallelize(model, group) as handle:

            def run():
                assert made.error(tiny.call(model, made.inputs)) <= made.tolerance, handle.way

            chosen(handle, run)
            force(handle, Way("halves", entries=(1, 1)))
            run()
            failed = handle._split.shares.trial.estimates[0].failed
            run()
            return failed, handle.way

    assert kyklos.run_local(2, work, device="cpu") == [(True, "equal shares")] * 2


@pytest.mark.parametrize("way", [Way("alone", entries=(0, 2)), Way("halves", entries=(1, 1)), Way("pair", pair=(0, 1))], ids=lambda way: way.name)
def test_a_fault_of_the_rank_that_computes_is_told(way):
    pair = with_guidance("Wan")
    models = pair[0].copies(2)

    def fails(*_):
        raise ZeroDivisionError("no luck")

    def work(group):
        model = models[group.rank]
        with parallelize(model, group) as handle:

            def step():
                for made in pair:
                    assert made.error(tiny.call(model, made.inputs)) <= made.tolerance

            chosen(handle, step)
            force(handle, way)
            for _ in range(4):
                step()
            hook = model.blocks[0].register_forward_hook(fails) if group.rank == 1 else None
            with pytest.raises((kyklos.RequestError, ZeroDivisionError), match="no luck"):
                step()
            if hook is not None:
                hook.remove()
            step()
            step()

    kyklos.run_local(2, work, device="cpu", deadline_s=30)


def test_forwards_with_gradients_are_split_and_leave_the_choice():
    made = case("Wan")
    models = made.copies(2)

    def work(group):
        model = models[group.rank]
        with parallelize(model, group) as handle:
            chosen(handle, lambda: tiny.call(model, made.inputs))
            force(handle, Way("alone", entries=(2, 0)))
            tiny.call(model, made.inputs)
            model(**made.inputs, return_dict=False)[0].square().mean().backward()
            kyklos.torch.sum_gradients(model.parameters(), group)
            assert handle._split.shares.way.name == "equal shares"
            assert made.error(tiny.call(model, made.inputs)) <= made.tolerance
            assert handle._split.shares.way.name == "alone"
            return sum(parameter.grad.abs().sum().item() for parameter in model.parameters())

    first, second = kyklos.run_local(2, work, device="cpu")
    assert first == pytest.approx(second) and first > 0


def test_remove_gives_the_forward_back_and_a_copy_chooses_for_itself():
    made = case("Wan")
    models = made.copies(2)

    def work(group):
        model = models[group.rank]
        handle = parallelize(model, group)
        chosen(handle, lambda: tiny.call(model, made.inputs))
        force(handle, Way("alone", entries=(2, 0)))
        twin = copy.deepcopy(model)
        for each in (twin, model, twin):
            assert made.error(tiny.call(each, made.inputs)) <= made.tolerance
        handle.remove()
        assert "forward" not in vars(model)
        assert made.error(tiny.call(model, made.inputs)) <= made.tolerance

    kyklos.run_local(2, work, device="cpu")


@pytest.mark.parametrize("options", [{"mesh": "1x2"}, {"strategy": "ring"}, {"shares": (1, 1)}, {"shares": "auto"}], ids=str)
def test_options_that_say_the_way_leave_no_choice(options):
    made = case("Wan")
    models = made.copies(2)

    def work(group):
        with parallelize(models[group.rank], group, **options) as handle:
            for _ in range(5):
                tiny.call(models[group.rank], made.inputs)
            return handle.ways

    assert kyklos.run_local(2, work, device="cpu") == ["", ""]


def run_trial(trial, times):
    """The names of the ways in the order in which they ran, with these times."""
    seen = []
    for _ in range(30):
        if trial.is_over:
            return seen
        seen.append(trial.now.way.name)
        trial.now.tried_s.append(times[seen[-1]].pop(0))
    raise AssertionError("no end")


def test_the_most_promising_ways_are_tried_and_the_fastest_stays():
    trial = Trial([Estimate(Way(name), seconds) for name, seconds in {"b": 1.2, "a": 1.0, "c": 1.5, "d": 3.0}.items()])
    # As promised, and the others promise much more.
    assert run_trial(trial, {"a": [1.0, 1.0]}) == ["a", "a"] and trial.now.way.name == "a"
    trial = Trial([Estimate(Way(name), seconds) for name, seconds in {"c": 1.5, "a": 1.0, "b": 1.1, "d": 3.0}.items()])
    assert run_trial(trial, {"a": [9.0, 2.0], "b": [1.8, 1.9]}) == ["a", "a", "b", "b"]
    assert trial.now.way.name == "b" and "<- chosen" in next(line for line in str(trial).splitlines() if line.startswith("b"))
    assert "<- chosen" not in next(line for line in str(trial).splitlines() if line.startswith("a"))


def test_predictions_are_corrected_by_those_of_their_kind():
    ways = {"ring": 1.0, "pass-q": 1.2, "line": 1.4}
    trial = Trial([*(Estimate(Way(name), seconds) for name, seconds in ways.items()), Estimate(Way("alone", entries=(1, 0)), 1.3)])
    # Splits take 1.5 times as long as predicted, so pass-q does not promise less; one rank alone was never tried, and is faster.
    assert run_trial(trial, {"ring": [1.5, 1.6], "alone": [0.9, 0.8]}) == ["ring", "ring", "alone", "alone"]
    assert trial.now.way.name == "alone"
    # Too slow by far, whatever the error.
    trial = Trial([Estimate(Way("ring"), 1.0), Estimate(Way("alone", entries=(1, 0)), 1.6)])
    assert run_trial(trial, {"ring": [1.0, 1.0]}) == ["ring", "ring"]


def test_the_second_of_two_calls_costs_what_the_first_one_left():
    pair = Estimate(Way("pair", pair=(0, 1)), 0.9)
    trial = Trial([pair, Estimate(Way("ring", (1, 1)), 2.0)])
    assert run_trial(trial, {"pair": [2.0, 0.1, 1.8, 0.0]}) == ["pair"] * 4
    assert pair.measured_s == 0.9


def test_ways_that_fail_are_left():
    trial = Trial([Estimate(Way("halves", entries=(1, 1)), 0.5), Estimate(Way("ring", (1, 1)), 1.0)])
    trial.estimates[0].failed = True
    assert run_trial(trial, {"ring": [1.1, 1.2]}) == ["ring", "ring"] and trial.now.way.name == "ring"
    trial.estimates[1].failed = True
    assert trial.now is None and "failed" in str(trial)
