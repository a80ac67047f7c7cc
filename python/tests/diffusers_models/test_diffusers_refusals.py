import gc
import diffusers
import pytest
import tiny_joint
import tiny_transformers as tiny
import torch
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from split_models import all_raise, case

import kyklos
import kyklos.diffusers
from kyklos.diffusers import SplitPlan, _attention, parallelize
from kyklos.diffusers._calls import Calls
from kyklos.diffusers._ways.shares import Shares


class Other(FluxAttnProcessor):
    """A processor that an adapter sets."""


def _without_a_plan():
    """Lumina 1 scales its attention by the number of tokens that it sees, a prior has few tokens and a causal mask."""
    make = {}
    make["LuminaNextDiT2DModel"] = lambda: diffusers.LuminaNextDiT2DModel(
        sample_size=8, in_channels=4, hidden_size=16, num_layers=1, num_attention_heads=2, num_kv_heads=2, cross_attention_dim=8, multiple_of=8
    )  # fmt: skip
    make["PriorTransformer"] = lambda: diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, embedding_dim=8, num_embeddings=7, additional_embeddings=4
    )  # fmt: skip
    return make


@pytest.mark.parametrize("name", _without_a_plan())
def test_transformers_whose_tokens_cannot_be_split_are_refused_by_name(name, alone):
    with pytest.raises(kyklos.RequestError, match=f"{name} has no plan, verified are Wan.*SplitPlan"):
        parallelize(_without_a_plan()[name](), alone)


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
    model.transformer_blocks[0].attn.set_processor(Other())
    with pytest.raises(
        kyklos.RequestError, match="transformer_blocks.0.attn of Flux.* has the processor Other, verified are Flux"
    ):
        parallelize(model, alone)


def test_plans_that_do_not_fit_are_refused(alone):
    # Splits of other tests that are garbage, with their copies of models.
    gc.collect()
    model = tiny.flux()
    plan = model._cp_plan
    for wrong, pattern in (
        (
            SplitPlan(plan, attention=("blocks.*",)),
            "no attention module of Flux.* matches 'blocks.*', it has transformer_blocks.0.attn",
        ),
        ({"rope": plan[""]}, "no module 'rope'"),
        ({"": {"image": plan[""]["hidden_states"]}}, "forward has no argument 'image'"),
    ):
        with pytest.raises(kyklos.RequestError, match=pattern):
            parallelize(model, alone, plan=wrong)
        assert not model._forward_pre_hooks and not _attention._splits
    shared = tiny.wan()
    for block in shared.blocks:
        block.attn2.processor = block.attn1.processor
    with pytest.raises(kyklos.RequestError, match="blocks.0.attn1 and blocks.0.attn2 share one processor"):
        parallelize(shared, alone)


def test_shares_that_do_not_fit_are_refused(alone):
    for shares, pattern in (
        ((1, 2), "2 shares for 1 ranks"),
        ((0,), "a positive one"),
        ((float("nan"),), "a positive one"),
    ):
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
        ("Flux", {"encoder_hidden_states": torch.ones(2, 1, 32), "txt_ids": torch.zeros(1, 3)}, "has 1 tokens for 2 ranks"),
        ("Flux 2", {"kv_cache_mode": "extract"}, "called with kv_cache_mode, which split transformers do not take"),
        ("LTX 2", {"video_self_attention_mask": torch.ones(2, 60, 60)}, "called with video_self_attention_mask"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_split_are_refused(name, change, pattern):
    models = case(name).copies(2)

    def run(group):
        with parallelize(models[group.rank], group):
            tiny.call(models[group.rank], {**case(name).inputs, **change})

    all_raise(2, run, pattern)


@pytest.mark.parametrize(
    ("make", "inputs", "change", "pattern"),
    [
        (tiny_joint.sd3, tiny_joint.sd3_inputs, {"skip_layers": [1]}, "called with skip_layers"),
        (tiny_joint.bria, tiny_joint.bria_inputs, {"controlnet_single_block_samples": [torch.ones(2, 2, 32)]}, "counted from the number of text"),
        (tiny_joint.mochi, tiny_joint.mochi_inputs, {"encoder_attention_mask": tiny_joint.padded(20, 7).flip(1)}, "with padding before tokens"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_split_are_refused(make, inputs, change, pattern, alone):
    model = make()
    with parallelize(model, alone), pytest.raises(kyklos.RequestError, match=pattern):
        tiny.call(model, {**inputs(), **change})


def test_configurations_that_cannot_be_split_are_refused(alone):
    model = tiny_joint.hunyuan_video(image_condition_type="token_replace")
    with pytest.raises(kyklos.RequestError, match="has image_condition_type='token_replace', which is not split, since its blocks count"):
        parallelize(model, alone)


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
        handle._split.active = True
        own = {"parallel_config": handle._split}
        for wrong, pattern in (
            ({"dropout_p": 0.5}, "dropout"),
            ({"is_causal": True}, "is_causal"),
            ({"attention_kwargs": {"return_lse": True}}, "return_lse"),
        ):
            with pytest.raises(kyklos.RequestError, match=pattern):
                dispatch(q, q, q, **wrong, **own)
        with pytest.raises(kyklos.RequestError, match=r"mask of shape \[8, 8\] for 1 batch entries of 8 keys"):
            dispatch(q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool), **own)
    models = case("Flux").copies(2)

    def run(group):
        with parallelize(models[group.rank], group) as handle:
            handle._split.active = True
            with pytest.raises(kyklos.RequestError, match="mask of 8 queries by the 8 keys of this rank"):
                dispatch(q, q, q, attn_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool), parallel_config=handle._split)

    kyklos.run_local(2, run, device="cpu")


def test_rows_of_a_mask_over_the_keys_of_all_ranks():
    torch.manual_seed(5)
    q, k, v = torch.randn(3, 2, 30, 4, 16)
    mask = torch.rand(2, 1, 30, 30) < 0.6

    def run(group):
        own = slice(0, 17) if group.rank == 0 else slice(17, 30)
        state = _attention.Split(group, "Model", Shares(group, None, {}), Calls("Model", 9))
        state.active = True
        return state.attend(q[:, own], k[:, own], v[:, own], mask[:, :, own], 0.25)[0]

    got = torch.cat(kyklos.run_local(2, run, device="cpu"), 1)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=0.25)
    assert (got - want.transpose(1, 2)).abs().max() < 2e-6


@pytest.mark.parametrize("name", ["timestep", "joint_attention_kwargs"])
def test_settings_that_differ_between_ranks_are_refused(name):
    models, inputs = case("Flux").copies(2), case("Flux").inputs
    timestep = inputs["timestep"]
    of_rank = {
        "timestep": [timestep, timestep * 1.01],
        "joint_attention_kwargs": [{"scale": 1.0}, {"scale": 0.5}],
    }[name]

    def run(group):
        with parallelize(models[group.rank], group):
            tiny.call(models[group.rank], {**inputs, name: of_rank[group.rank]})

    all_raise(2, run, f"rank 1 has (other values of|another) {name}")


def test_weights_that_differ_between_ranks_are_refused():
    models = case("Flux").copies(2)
    with torch.no_grad():
        next(models[1].parameters()).mul_(2.0)
    seen = all_raise(2, lambda group: parallelize(models[group.rank], group), "rank 1 has other weights of Flux")
    assert "same checkpoint" in seen


def test_models_in_another_order_are_refused_and_work_afterwards():
    pairs = list(zip(case("Flux").copies(2), case("Flux").copies(2), strict=True))
    for _, second in pairs:
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.mul_(1.5)
    inputs = case("Flux").inputs
    want = tiny.call(pairs[0][0], inputs)

    def run(group):
        first, second = pairs[group.rank]
        with parallelize(first, group), parallelize(second, group):
            swapped = (first, second) if group.rank == 0 else (second, first)
            for model in swapped:
                with pytest.raises(kyklos.RequestError, match="model 1.*model 2|model 2.*model 1"):
                    tiny.call(model, inputs)
            # One more forward of one model on one rank only: its count is ahead.
            with pytest.raises(kyklos.RequestError):
                tiny.call(first if group.rank == 0 else second, inputs)
            return tiny.call(first, inputs)

    for got in kyklos.run_local(2, run, device="cpu"):
        assert (got - want).abs().max() < 1e-4
