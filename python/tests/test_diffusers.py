import copy
import functools
import logging
import os
import pathlib
import socket
import subprocess
import sys
import threading

import diffusers
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

import kyklos
import kyklos.diffusers
import tiny_transformers as tiny
from kyklos import _diffusers_attention, _diffusers_hooks
from kyklos.diffusers import SplitPlan, parallelize


@functools.cache
def case(name):
    return tiny.CASES[name]()


def split(case, world=2, call=tiny.call, **options):
    """Outputs of the split model by rank."""
    models = case.copies(world)

    def run(group):
        with parallelize(models[group.rank], group, **options):
            return call(models[group.rank], case.inputs)

    return kyklos.run_local(world, run, device="cpu")


def all_raise(world, run, pattern):
    """Each rank gets a request error that matches, and the group stays usable: the next call of its ranks succeeds."""
    seen = []

    def caught(group):
        with pytest.raises(kyklos.RequestError, match=pattern) as error:
            run(group)
        seen.append(str(error.value))
        ones = torch.ones(1, 8, 1, 8)
        group.attend(ones, ones, ones, label="after")

    kyklos.run_local(world, caught, device="cpu")
    assert len(seen) == world
    return seen[0]


@pytest.mark.parametrize("name", tiny.CASES)
@pytest.mark.parametrize("shares", [(1, 1), (3, 7), (2, 1, 5), (1, 30)], ids=lambda shares: ":".join(map(str, shares)))
def test_a_split_transformer_computes_what_the_whole_one_does(name, shares):
    for output in split(case(name), len(shares), shares=shares):
        assert case(name).error(output) <= case(name).tolerance


@pytest.mark.parametrize("name", tiny.CASES)
@pytest.mark.parametrize("mesh", ["1x2", "2x1", "2x2", "1x3"])
def test_meshes(name, mesh):
    made = case(name)
    if "QwenImage" in name:  # An even number of heads.
        made = tiny.Case(tiny.qwen(heads=4), tiny.qwen_inputs())
    ulysses, ring = map(int, mesh.split("x"))
    for output in split(made, ulysses * ring, mesh=mesh):
        assert made.error(output) <= made.tolerance


def test_all_ranks_have_the_same_bits():
    first, *others = split(case("QwenImage, text masks"), 3, shares=(2, 1, 5))
    assert all(torch.equal(first, other) for other in others)


def test_joint_tokens_that_no_number_of_ranks_divides_with_text_masks():
    made = tiny.Case(tiny.qwen(), tiny.qwen_inputs(text=25))
    counts = []
    attend = _diffusers_attention.Split.attend

    def seen(self, q, *others):
        counts.append((self.group.rank, q.shape[1]))
        return attend(self, q, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_diffusers_attention.Split, "attend", seen)
        outputs = split(made, 3, shares=(25, 24, 24))
    assert set(counts) == {(0, 25), (1, 24), (2, 24)}
    assert max(made.error(output) for output in outputs) <= made.tolerance


def test_a_plan_of_diffusers_with_split_keys_of_the_prompt():
    """Queries and keys of different lengths, and masks of float with a row for each head."""
    made = case("LTX")
    plan = made.model._cp_plan
    for output in split(made, 3, plan=plan, shares=(1, 2, 5)):
        assert made.error(output) <= made.tolerance


def test_half_precision():
    """With the rounding of bfloat16 instead of float32."""
    made = case("QwenImage, text masks")
    model = copy.deepcopy(made.model).to(torch.bfloat16)
    inputs = {k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in made.inputs.items()}
    half = tiny.Case.__new__(tiny.Case)
    half.model, half.inputs, half.exact = model, inputs, made.exact
    dense = half.error(tiny.call(model, inputs))
    assert 0.001 < dense < 0.1
    for output in split(half, 3, shares=(2, 1, 5)):
        assert output.dtype == torch.bfloat16
        assert half.error(output) <= 2 * dense


def test_head_dimensions_that_are_no_multiple_of_8():
    torch.manual_seed(1)
    config = {**tiny.flux().config, "attention_head_dim": 12, "axes_dims_rope": (4, 4, 4)}
    made = tiny.Case(diffusers.FluxTransformer2DModel.from_config(config), tiny.flux_inputs())
    for output in split(made, 2, shares=(3, 7)):
        assert made.error(output) <= made.tolerance


# Negative controls: what the tolerance is worth.


def test_a_dropped_mask_is_far_outside_the_tolerance():
    made = case("QwenImage, text masks")
    inputs = {**made.inputs, "encoder_hidden_states_mask": None}
    outputs = split(made, call=lambda model, _: tiny.call(model, inputs))
    assert made.error(outputs[0]) > 100 * made.tolerance


def test_a_mask_in_the_order_of_the_whole_model_is_far_outside_the_tolerance(monkeypatch):
    """Ranks hold text and image tokens in turn, so the mask of all text and then all image tokens is of other keys."""
    made = case("QwenImage, text masks")
    joint = torch.cat([made.inputs["encoder_hidden_states_mask"], torch.ones(2, 48, dtype=torch.bool)], 1)
    monkeypatch.setattr(_diffusers_attention.Split, "_gather_mask", lambda *_: joint)
    assert made.error(split(made)[0]) > 100 * made.tolerance


def test_attention_to_local_keys_is_far_outside_the_tolerance_and_refused(monkeypatch):
    made = case("Flux")
    models = made.copies(2)

    def run(group, expected):
        model = models[group.rank]
        with parallelize(model, group) as handle:
            model.transformer_blocks[0].attn.set_processor(FluxAttnProcessor())
            handle._split.expected = expected
            return tiny.call(model, made.inputs)

    assert "made 3 calls of split attention in a forward, its plan has 4" in all_raise(2, lambda group: run(group, 4), "call parallelize again")
    outputs = kyklos.run_local(2, lambda group: run(group, 3), device="cpu")
    assert made.error(outputs[0]) > 100 * made.tolerance


def test_positions_of_the_first_tokens_on_all_ranks_are_far_outside_the_tolerance(monkeypatch):
    made = case("Flux")
    part = _diffusers_hooks.Splitter.part

    def wrong(self, x, how, name):
        own = part(self, x, how, name)
        return x.narrow(how.split_dim, 0, own.shape[how.split_dim]) if name == "img_ids" else own

    monkeypatch.setattr(_diffusers_hooks.Splitter, "part", wrong)
    assert made.error(split(made)[0]) > 100 * made.tolerance


# Counting and comparing.


class Twice(FluxAttnProcessor):
    def __call__(self, *args, **kwargs):
        super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def test_an_extra_call_is_refused():
    made = case("Flux")
    models = made.copies(2)
    for model in models:
        model.single_transformer_blocks[1].attn.set_processor(Twice())

    def run(group):
        with parallelize(models[group.rank], group, plan=models[0]._cp_plan):
            tiny.call(models[group.rank], made.inputs)

    assert "more than the 4 calls" in all_raise(2, run, "unload adapters")


def test_a_call_outside_of_a_forward_is_refused():
    made = case("Flux")
    models = made.copies(2)

    def run(group):
        model = models[group.rank]
        with parallelize(model, group), torch.no_grad():
            model.forward(**made.inputs)  # Without the hooks of the transformer.

    all_raise(2, run, "outside its forward")


def test_ranks_with_other_inputs_are_refused():
    made = case("Wan")
    models = made.copies(3)
    other = {**made.inputs, "hidden_states": torch.randn_like(made.inputs["hidden_states"])}
    longer = tiny.wan_inputs(frames=4)

    def run(wrong, group):
        with parallelize(models[group.rank], group):
            tiny.call(models[group.rank], wrong if group.rank == 1 else made.inputs)

    text = all_raise(3, functools.partial(run, other), "rank 1 has other values of hidden_states than rank 0")
    assert "generator with the same seed" in text
    all_raise(3, functools.partial(run, longer), r"rank 1 has hidden_states of shape \[2, 4, 4, 10, 14\], rank 0 of \[2, 4, 3, 10, 14\]")
    # Rounding of unlike devices is no difference.
    near = {**made.inputs, "hidden_states": made.inputs["hidden_states"].bfloat16().float()}
    kyklos.run_local(3, functools.partial(run, near), device="cpu")


def test_ranks_with_other_shares_are_refused():
    made = case("Flux")
    models = made.copies(2)

    def run(group):
        with parallelize(models[group.rank], group, shares=(1, 1 + group.rank)):
            tiny.call(models[group.rank], made.inputs)

    text = all_raise(2, run, "label")
    assert "shares 1:1" in text and "shares 1:2" in text


def test_masks_are_gathered_once_and_again_only_where_a_rank_has_new_ones():
    """Masks that change on some ranks only: those that find theirs again must not use an old one of the others."""
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 2, 2, 30, 4, 16).unbind(0)[:3]
    q, k, v = q[0].clone(), k[0].clone(), v[0].clone()
    masks = [torch.ones(2, 1, 1, 30, dtype=torch.bool) for _ in range(3)]
    masks[1][0, :, :, 25:] = False  # Only the second rank sees it.
    masks[2] = torch.randn(2, 4, 1, 30).masked_fill(torch.rand(2, 4, 1, 30) < 0.3, float("-inf"))
    labels = [[], []]

    def run(group):
        own = slice(0, 17) if group.rank == 0 else slice(17, 30)
        attend = group.attend

        def noted(*args, **options):
            labels[group.rank].append(options["label"])
            return attend(*args, **options)

        group.attend = noted
        state = _diffusers_attention.Split(group, "Model", (1, 1), None, 99)
        _diffusers_attention.register(state)
        state._active = True
        outputs = []
        for number in (0, 0, 2, 2, 0, 1, 1, 0, 2):
            parts = [x[:, own] for x in (q, k, v)]
            outputs.append((number, own, state.attend(*parts, masks[number][..., own], 0.25)))
        _diffusers_attention.unregister(state)
        return outputs

    for outputs in kyklos.run_local(2, run, device="cpu"):
        for number, own, o in outputs:
            want = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=masks[number], scale=0.25
            ).transpose(1, 2)[:, own]
            assert (o - want).abs().max() < 2e-6
    # Three of the first five find their masks. In the sixth the ranks disagree; from there on masks are gathered.
    assert [len([label for label in own if "its mask" in label]) for own in labels] == [6, 7]
    assert [len([label for label in own if label.endswith(("mask 0", "mask 1"))]) for own in labels] == [4, 3]


def test_gathering_returns_the_bits():
    torch.manual_seed(4)
    x = {dtype: torch.randn(50, 3, 300).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}

    def run(group):
        cuts = [0, 7, 7, 50]
        for whole in x.values():
            part = whole[cuts[group.rank] : cuts[group.rank + 1]].flatten(1)[None]
            got = _diffusers_attention._gather(group, part, "gather")
            assert torch.equal(got, whole.flatten(1)[None])

    kyklos.run_local(3, run, device="cpu")


def test_shares_of_tokens():
    assert _diffusers_hooks.bounds(73, (1, 1, 1)) == [0, 24, 49, 73]
    assert _diffusers_hooks.bounds(10, (3, 7)) == [0, 3, 10]
    assert _diffusers_hooks.bounds(20, (1, 1000)) == [0, 1, 20]
    assert _diffusers_hooks.bounds(20, (1000, 1, 1)) == [0, 18, 19, 20]
    assert _diffusers_hooks.bounds(3, (1000, 1, 1)) == [0, 1, 2, 3]
    for total in range(4, 60):
        cuts = _diffusers_hooks.bounds(total, (5, 1, 90, 1))
        assert cuts[0] == 0 and cuts[-1] == total and all(a < b for a, b in zip(cuts, cuts[1:], strict=False))


# Refusals.


def _direct_sdpa():
    make = {}
    make["SD3Transformer2DModel"] = lambda: diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    make["CogVideoXTransformer3DModel"] = lambda: diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=4, text_embed_dim=8,
        num_layers=1, sample_width=8, sample_height=8, sample_frames=9, max_text_seq_length=8,
    )  # fmt: skip
    make["AuraFlowTransformer2DModel"] = lambda: diffusers.AuraFlowTransformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, out_channels=4, pos_embed_max_size=64,
    )  # fmt: skip
    make["MochiTransformer3DModel"] = lambda: diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16, in_channels=4,
        text_embed_dim=16, time_embed_dim=4, max_sequence_length=8,
    )  # fmt: skip
    return make


@pytest.mark.parametrize("name", _direct_sdpa())
def test_transformers_that_call_pytorch_directly_are_refused_by_name(name):
    model = _direct_sdpa()[name]()
    group = kyklos.Group.local(1, device="cpu")[0]
    for plan in (None, {"": {"hidden_states": diffusers.ContextParallelConfig}}):
        with pytest.raises(kyklos.RequestError, match=f"{name} calls PyTorch's attention directly in .*Processor.*use one of Wan"):
            parallelize(model, group, plan=plan)
    group.close()


@pytest.fixture
def alone():
    with kyklos.Group.local(1, device="cpu")[0] as group:
        yield group


def test_transformers_without_a_verified_plan_are_refused_by_name(alone):
    with pytest.raises(kyklos.RequestError, match="Linear has no plan, verified are Wan.*SplitPlan"):
        parallelize(torch.nn.Linear(2, 2), alone)
    with pytest.raises(kyklos.RequestError, match="Wider has a _cp_plan that is not verified"):
        parallelize(type("Wider", (diffusers.FluxTransformer2DModel,), {}).from_config(tiny.flux().config), alone)
    model = tiny.flux()
    model.transformer_blocks[0].attn.set_processor(Twice())
    with pytest.raises(kyklos.RequestError, match="transformer_blocks.0.attn of Flux.* has the processor Twice, verified are Flux"):
        parallelize(model, alone)


def test_plans_that_do_not_fit_are_refused(alone):
    model = tiny.flux()
    plan = model._cp_plan
    for wrong, pattern in (
        (SplitPlan(plan, attention=("blocks.*",)), "no attention module of Flux.* matches 'blocks.*', it has transformer_blocks.0.attn"),
        ({"rope": plan[""]}, "no module 'rope'"),
        ({"": {"image": plan[""]["hidden_states"]}}, "forward has no argument 'image'"),
    ):
        with pytest.raises(kyklos.RequestError, match=pattern):
            parallelize(model, alone, plan=wrong)
        assert not model._forward_pre_hooks and not _diffusers_attention._splits
    shared = tiny.wan()
    for block in shared.blocks:
        block.attn2.processor = block.attn1.processor
    with pytest.raises(kyklos.RequestError, match="blocks.0.attn1 and blocks.0.attn2 share one processor"):
        parallelize(shared, alone)


def test_shares_that_do_not_fit_are_refused(alone):
    for shares, pattern in (((1, 2), "2 shares for 1 ranks"), ((0,), "a positive one"), ((float("nan"),), "a positive one")):
        with pytest.raises(kyklos.RequestError, match=pattern):
            parallelize(tiny.flux(), alone, shares=shares)


def test_a_transformer_is_split_once(alone):
    model = tiny.flux()
    with parallelize(model, alone) as handle:
        assert "4 calls" in repr(handle)
        with pytest.raises(kyklos.RequestError, match="split by kyklos already"):
            parallelize(model, alone)
    assert "removed" in repr(handle)
    with parallelize(model, alone):
        pass
    model._parallel_config = diffusers.ContextParallelConfig(ring_degree=2)
    with pytest.raises(kyklos.RequestError, match="enable_parallelism"):
        parallelize(model, alone)


@pytest.mark.parametrize(
    ("name", "change", "pattern"),
    [
        ("Flux", {"img_ids": torch.zeros(1, 35, 3)}, "img_ids has 3 axes, the plan expects 2"),
        ("Flux", {"encoder_hidden_states": torch.ones(2, 1, 32), "txt_ids": torch.zeros(1, 3)}, "encoder_hidden_states has 1 tokens for 2 ranks"),
        ("Flux 2", {"kv_cache_mode": "extract"}, "kv_cache_mode='extract'.*need None"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_split_are_refused(name, change, pattern):
    models = case(name).copies(2)

    def run(group):
        with parallelize(models[group.rank], group):
            tiny.call(models[group.rank], {**case(name).inputs, **change})

    all_raise(2, run, pattern)


def test_caches_that_skip_attention_are_refused(alone):
    model = tiny.flux()
    with parallelize(model, alone):
        model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
        with pytest.raises(kyklos.RequestError, match="disable_cache"), model.cache_context("cond"):
            tiny.call(model, tiny.flux_inputs())


def test_calls_that_the_engine_does_not_compute_are_refused(alone):
    q = torch.randn(1, 8, 2, 16)
    dispatch = attention_dispatch.dispatch_attention_fn
    with parallelize(tiny.flux(), alone) as handle:
        handle._split._active = True
        own = {"parallel_config": handle._split}
        for wrong, pattern in (
            ({"dropout_p": 0.5}, "dropout"),
            ({"is_causal": True}, "is_causal"),
            ({"attention_kwargs": {"return_lse": True}}, "return_lse"),
        ):
            with pytest.raises(kyklos.RequestError, match=pattern):
                dispatch(q, q, q, **wrong, **own)
    groups = kyklos.Group.local(2, device="cpu")
    with parallelize(tiny.flux(), groups[0]) as handle, groups[0], groups[1]:
        handle._split._active = True
        with pytest.raises(kyklos.RequestError, match="mask of 8 queries by the 8 keys of this rank"):
            dispatch(q, q, q, attn_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool), parallel_config=handle._split)


def test_rows_of_a_mask_over_the_keys_of_all_ranks():
    torch.manual_seed(5)
    q, k, v = torch.randn(3, 2, 30, 4, 16)
    mask = torch.rand(2, 1, 30, 30) < 0.6

    def run(group):
        own = slice(0, 17) if group.rank == 0 else slice(17, 30)
        state = _diffusers_attention.Split(group, "Model", (1, 1), None, 9)
        state._active = True
        return state.attend(q[:, own], k[:, own], v[:, own], mask[:, :, own], 0.25)

    got = torch.cat(kyklos.run_local(2, run, device="cpu"), 1)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=0.25)
    assert (got - want.transpose(1, 2)).abs().max() < 2e-6


def test_backward_raises(alone):
    model = tiny.flux()
    with parallelize(model, alone), pytest.raises(NotImplementedError, match="no_grad"):
        model(**tiny.flux_inputs(), return_dict=False)[0].sum().backward()


# What handle.remove() leaves, and other hooks.


def _state(model):
    registry = attention_dispatch._AttentionBackendRegistry
    return (
        dict(registry._backends),
        {name: set(accepted) for name, accepted in registry._supported_arg_names.items()},
        [(list(m._forward_hooks), list(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()],
        [vars(m.processor) for m in model.modules() if hasattr(m, "processor")],
    )


def test_remove_restores_everything():
    made = case("QwenImage, text masks")
    models = made.copies(2)
    before = _state(models[0])
    models[1].transformer_blocks[0].attn.processor._parallel_config = None  # Set on the object before.
    barrier = threading.Barrier(2)

    def run(group):
        handle = parallelize(models[group.rank], group)
        barrier.wait()
        assert _state(models[0]) != before
        tiny.call(models[group.rank], made.inputs)
        barrier.wait()
        handle.remove()
        handle.remove()
        return tiny.call(models[group.rank], made.inputs)

    for output in kyklos.run_local(2, run, device="cpu"):
        assert torch.equal(output, made.dense)
    assert _state(models[0]) == before
    assert vars(models[1].transformer_blocks[0].attn.processor) == {"_parallel_config": None}
    assert not _diffusers_attention._splits and not _diffusers_attention._plain


def test_an_unsplit_transformer_beside_a_split_one(alone):
    """Such as two transformers of a pipeline, or a rank's own model: backends work as before."""
    made = case("Wan")
    with parallelize(made.copies(1)[0], alone):
        assert torch.equal(tiny.call(made.model, made.inputs), made.dense)
        with attention_dispatch.attention_backend("_native_math"):
            assert (tiny.call(made.model, made.inputs) - made.dense).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["native", "_native_math", "_native_efficient", "flex"])
def test_every_backend_hands_split_calls_on(backend):
    """Also those that do not know ``_parallel_config``, which diffusers would drop."""
    made = case("Flux")
    models = made.copies(2)

    def run(group):
        with parallelize(models[group.rank], group):
            return tiny.call(models[group.rank], made.inputs)

    with attention_dispatch.attention_backend(backend):
        outputs = kyklos.run_local(2, run, device="cpu")
    assert made.error(outputs[0]) <= made.tolerance


class Lora(torch.nn.Module):
    """What an adapter puts in the place of a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def add_lora(model):
    torch.manual_seed(6)
    for block in model.transformer_blocks:
        block.attn.to_q, block.attn.to_v = Lora(block.attn.to_q), Lora(block.attn.to_v)
    model.proj_out = Lora(model.proj_out)


class Scale(ModelHook):
    """A hook of diffusers that replaces forward, as those of offloading do."""

    def post_forward(self, module, output):
        return output * 2


def add_hooks(model):
    import accelerate

    HookRegistry.check_if_exists_or_initialize(model.x_embedder).register_hook(Scale(), "scale")
    HookRegistry.check_if_exists_or_initialize(model).register_hook(ModelHook(), "nothing")
    accelerate.cpu_offload_with_hook(model, execution_device="cpu")


def test_adapters_and_offloading_before_and_after():
    import accelerate

    made = case("Flux")
    models = made.copies(3)
    whole = models[2]
    add_lora(whole)
    add_hooks(whole)
    want = tiny.call(whole, made.inputs)
    assert (want - made.dense).abs().max() > 0.01
    # An adapter on the output: the gather is of its module, so it comes after. Only adapters on other modules may come later.
    for model in models[:2]:
        add_lora(model)
    add_hooks(models[0])

    def run(group):
        model = models[group.rank]
        with parallelize(model, group):
            if group.rank == 1:
                add_hooks(model)
            outputs = [tiny.call(model, made.inputs)]
            # What a pipeline does after each image.
            accelerate.hooks.remove_hook_from_module(model, recurse=True)
            accelerate.cpu_offload_with_hook(model, execution_device="cpu")
            outputs.append(tiny.call(model, made.inputs))
        return outputs + [tiny.call(model, made.inputs)]

    for outputs in kyklos.run_local(2, run, device="cpu"):
        assert torch.equal(outputs[2], want)
        assert all((output - want).abs().max() < 4e-6 for output in outputs)


@pytest.mark.parametrize("name", ["Wan", "QwenImage, text masks"])
def test_compiled_blocks(name, monkeypatch):
    # pytest's log capture would have dynamo print every guard.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    made = case(name)
    other = tiny.Case(made.model, tiny.wan_inputs(frames=4)) if name == "Wan" else made
    models = made.copies(2)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()

    def run(group):
        model = models[group.rank]
        with parallelize(model, group, shares=(3, 7)):
            model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
            return [tiny.call(model, of.inputs) for of in (made, other, made)]

    for first, second, third in kyklos.run_local(2, run, device="cpu"):
        assert made.error(first) <= made.tolerance and other.error(second) <= other.tolerance
        assert torch.equal(first, third)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]


# Whole pipelines, failures and processes.


def wan_pipeline():
    """Two calls of the transformer in a step: with and without the prompt."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.manual_seed(7)
    prompts = {"prompt_embeds": torch.randn(1, 12, 16), "negative_prompt_embeds": torch.randn(1, 12, 16)}

    def run(transformer, seed=0):
        pipe = diffusers.WanPipeline(None, None, None, copy.deepcopy(scheduler), transformer)
        pipe.set_progress_bar_config(disable=True)
        size = {"height": 80, "width": 112, "num_frames": 9}
        generator = torch.Generator().manual_seed(seed)
        return pipe(**prompts, **size, num_inference_steps=4, guidance_scale=4.0, generator=generator, output_type="latent").frames

    return tiny.wan(), run


def qwen_pipeline():
    """Prompts with and without padding, so that the steps have two masks."""
    torch.manual_seed(7)
    masks = [torch.ones(1, 14, dtype=torch.long), torch.ones(1, 9, dtype=torch.long)]
    masks[0][0, 11:] = 0
    masks[1][0, 2:] = 0
    prompts = {
        "prompt_embeds": torch.randn(1, 14, 16),
        "prompt_embeds_mask": masks[0],
        "negative_prompt_embeds": torch.randn(1, 9, 16),
        "negative_prompt_embeds_mask": masks[1],
    }

    def run(transformer, seed=0):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
        pipe = diffusers.QwenImagePipeline(scheduler, None, None, None, transformer)
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(seed)
        options = {"height": 96, "width": 128, "num_inference_steps": 4, "true_cfg_scale": 4.0}
        return pipe(**prompts, **options, generator=generator, output_type="latent").images

    return tiny.qwen(), run


@pytest.mark.parametrize("pipeline", [wan_pipeline, qwen_pipeline])
def test_a_whole_pipeline_with_guidance(pipeline):
    model, run = pipeline()
    want = run(model)
    assert (run(model, seed=1) - want).abs().max() > 0.1
    models = [copy.deepcopy(model) for _ in range(3)]

    def rank(group):
        with parallelize(models[group.rank], group, shares=(2, 1, 5)):
            return run(models[group.rank])

    first, *others = kyklos.run_local(3, rank, device="cpu")
    assert all(torch.equal(first, other) for other in others)
    # Guidance of 4 multiplies the rounding of a step by 7, and there are four steps.
    assert (first - want).abs().max() < 28 * 2e-6

    def forgotten(group):
        with parallelize(models[group.rank], group, shares=(2, 1, 5)):
            run(models[group.rank], seed=group.rank)

    all_raise(3, forgotten, "rank 1 has other values of hidden_states than rank 0.*generator with the same seed")


def test_a_rank_that_fails_in_a_step_is_named_and_a_new_group_goes_on():
    made = case("Wan")
    models = made.copies(3)
    groups = kyklos.Group.local(3, device="cpu", deadline_s=20)
    errors = {}

    class Full(RuntimeError):
        pass

    def run(group):
        model = models[group.rank]

        def fail(*_):
            raise Full("the device is full")

        try:
            with group, parallelize(model, group):
                tiny.call(model, made.inputs)
                hook = model.blocks[1].register_forward_pre_hook(fail) if group.rank == 1 else None
                try:
                    tiny.call(model, made.inputs)
                finally:
                    if hook:
                        hook.remove()
        except (Full, kyklos.GroupError) as error:
            errors[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert isinstance(errors[1], Full)
    for other in (0, 2):
        assert errors[other].peer == 1
        assert "the device is full" in str(errors[other])

    def again(group):
        with parallelize(models[group.rank], group):
            return tiny.call(models[group.rank], made.inputs)

    for output in kyklos.run_local(3, again, device="cpu"):
        assert made.error(output) <= made.tolerance


_PROCESS = """
import sys
import torch, torch.distributed as dist
import kyklos, kyklos.diffusers
import tiny_transformers as tiny
torch.set_num_threads(1)
dist.init_process_group("gloo")
for name in ("Wan", "QwenImage, text masks"):
    made = tiny.CASES[name]()
    with kyklos.Group.from_torch(device="cpu", join_deadline_s=30, deadline_s=30) as group:
        assert group.network, "not over a network"
        with kyklos.diffusers.parallelize(made.model, group, shares=(3, 7)):
            output = tiny.call(made.model, made.inputs)
    print("RESULT", made.error(output) <= made.tolerance, flush=True)
dist.destroy_process_group()
"""


def _environment():
    tests = pathlib.Path(__file__).parent
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_two_processes_over_quic():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    own = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS],
            env={**_environment(), **own, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err
        assert [line for line in out.splitlines() if line.startswith("RESULT")] == ["RESULT True"] * 2


def test_the_example_runs():
    example = pathlib.Path(__file__).parents[1] / "examples" / "denoise.py"
    assert len(example.read_text().splitlines()) <= 60
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(example)]
    end = subprocess.run([*command, "--steps", "2"], env=_environment(), capture_output=True, text=True, timeout=120)
    assert end.returncode == 0, end.stderr
    assert "2 ranks" in end.stdout and "unsplit" in end.stdout
