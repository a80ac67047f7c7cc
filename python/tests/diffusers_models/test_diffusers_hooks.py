"""What ``handle.remove()`` leaves, and other hooks, backends and compilation."""

import gc
import logging
import threading

import pytest
import tiny_transformers as tiny
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models import attention_dispatch
from split_models import case

import kyklos
import kyklos.diffusers
from kyklos.diffusers import _attention, parallelize


@pytest.fixture
def alone():
    with kyklos.Group.local(1, device="cpu")[0] as group:
        yield group


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
    gc.collect()  # Split models of other tests.
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
    assert not _attention._splits and not _attention._plain


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
    # One was compiled before it is split: its code must not miss the hooks.
    models[1].compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert made.error(tiny.call(models[1], made.inputs)) <= made.tolerance
    torch._dynamo.utils.counters.clear()

    def run(group):
        model = models[group.rank]
        with parallelize(model, group, shares=(3, 7)):
            if group.rank == 0:
                model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
            outputs = [tiny.call(model, of.inputs) for of in (made, other, made)]
        return *outputs, tiny.call(model, made.inputs)

    for first, second, third, whole in kyklos.run_local(2, run, device="cpu"):
        assert made.error(whole) <= made.tolerance
        assert made.error(first) <= made.tolerance and other.error(second) <= other.tolerance
        assert torch.equal(first, third)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
