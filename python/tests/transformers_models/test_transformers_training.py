"""Gradients of split models of transformers against those of the unsplit ones."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from tiny_models import build, build_class, in_float64, on_ranks, texts

import kyklos
import kyklos.torch
import kyklos.transformers

FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "gpt2", "deepseek-v3", "opt"]


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def unsplit(model, **inputs):
    """The loss and the gradients of the unsplit model."""
    own = copy.deepcopy(model)
    loss = own(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(own)


def check(results, model, times=2, **inputs):
    """Sums over the ranks against the unsplit model in float64.

    A sum in another order has an error of the size of the unsplit model's own in float32, so ``times`` that is allowed, twice for the largest
    of thousands of rounding errors; and 3e-6 of the largest gradient of the parameter, for those that happen to be exact. A part
    that is missing or doubled, or a target that a border of shards cuts off, is an error of 1/tokens or more: the smallest is 1e-3.
    In 16 bits each rank rounds its part of a gradient, so that for 3e-6 there stands the distance of neighbours of 1. The loss is a mean
    over tokens whose logits are rounded, so its error is that distance over the root of their number; a token that is missing is an
    error of 1/tokens.
    """
    eps = torch.finfo(model.dtype).eps
    is_f32 = model.dtype == torch.float32
    rest, rest_of_loss = (3e-6, 1e-6) if is_f32 else (eps, eps / inputs["input_ids"].numel() ** 0.5)
    exact_loss, exact = unsplit(in_float64(model), **inputs)
    plain_loss, plain = unsplit(model, **inputs)
    first = results[0][1]
    for loss, found in results:
        assert found.keys() == exact.keys()
        assert abs(loss - exact_loss) <= 2 * abs(plain_loss - exact_loss) + rest_of_loss * exact_loss
        for name, ours in found.items():
            assert torch.equal(ours, first[name]), name
            bound = times * (plain[name] - exact[name]).abs().max() + rest * exact[name].abs().max()
            assert (ours - exact[name]).abs().max() <= bound, name


def step(whole=False, **inputs):
    """A rank's step: the loss over all ranks, and the gradients of it."""

    def work(model, handle, group):
        loss = model(**inputs).loss
        # Where each rank has the whole loss, the sum over the ranks would have it so many times.
        (loss / group.size if whole else loss).backward()
        kyklos.torch.sum_gradients(model.parameters(), group)
        total = loss.detach() if whole else sum(group_losses(group, loss))
        return total, gradients(model)

    return work


def group_losses(group, loss):
    from kyklos._rows import gather

    return gather(group, loss.detach().reshape(1, 1, 1), "losses").flatten()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_own_losses_add_up(family):
    model, ids = build(family), texts(2, 31)
    results = on_ranks(model, 2, step(input_ids=ids, labels=ids), shares=[3, 7], gather="none")
    check(results, model, input_ids=ids, labels=ids)


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
@pytest.mark.parametrize("mesh", [None, "1x3", "3x1"])
def test_three_ranks_with_ignored_targets(family, mesh):
    model, ids = build(family), texts(2, 31)
    labels = ids.clone()
    labels[0, :9] = labels[1, 20:] = -100
    results = on_ranks(model, 3, step(input_ids=ids, labels=labels), shares=[2, 1, 5], gather="none", mesh=mesh)
    check(results, model, input_ids=ids, labels=labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_types_of_16_bits(dtype):
    model, ids = build("llama").to(dtype), texts(2, 31)
    results = on_ranks(model, 2, step(input_ids=ids, labels=ids), shares=[3, 7], gather="none")
    check(results, model, input_ids=ids, labels=ids)


@pytest.mark.parametrize("shares", [[3, 7], [2, 1, 5]], ids=str)
def test_whole_losses_are_divided_by_the_ranks(shares):
    model, ids = build("llama", tie_word_embeddings=True), texts(2, 31)
    results = on_ranks(model, len(shares), step(True, input_ids=ids, labels=ids), shares=shares)
    check(results, model, input_ids=ids, labels=ids)


def test_heads_that_see_all_tokens():
    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "num_labels": 3,
    }
    ids, labels = texts(3, 17), torch.tensor([0, 2, 1])
    for cls, config in (("BertForSequenceClassification", "BertConfig"), ("LlamaForSequenceClassification", "LlamaConfig")):
        # A classifier of BERT has dropout, and no model here is in training mode.
        model = build_class(cls, config, settings)
        results = on_ranks(model, 2, step(True, input_ids=ids, labels=labels), shares=[3, 7])
        check(results, model, input_ids=ids, labels=labels) if cls.startswith("Llama") else check_bert(results, model, ids, labels)


def check_bert(results, model, ids, labels):
    """BERT takes no use_cache."""
    losses = []
    for one in (in_float64(model), model):
        own = copy.deepcopy(one)
        own(input_ids=ids, labels=labels).loss.backward()
        losses.append(gradients(own))
    exact, plain = losses
    for _, found in results:
        for name, ours in found.items():
            bound = 2 * (plain[name] - exact[name]).abs().max() + 3e-6 * exact[name].abs().max()
            assert (ours - exact[name]).abs().max() <= bound, name


def test_padding_packed_documents_and_hidden_states():
    model, ids = build("llama"), texts(2, 23)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    labels = ids.masked_fill(mask == 0, -100)
    inputs = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    check(on_ranks(model, 2, step(**inputs), shares=[3, 7], gather="none"), model, **inputs)
    positions = torch.cat([torch.arange(count) for count in (7, 10, 6)])[None]
    inputs = {"input_ids": ids[:1], "position_ids": positions, "labels": ids[:1]}
    check(on_ranks(model, 2, step(**inputs), shares=[3, 7], gather="none"), model, **inputs)


def test_checkpoints_of_layers_and_two_passes_before_one_backward():
    model, one, two = build("mistral").train(), texts(2, 31), texts(1, 19, seed=4)
    model.gradient_checkpointing_enable()

    def losses(model):
        return model(input_ids=one, labels=one).loss + model(input_ids=two, labels=two).loss

    def work(model, handle, group):
        losses(model).backward()
        kyklos.torch.sum_gradients(model.parameters(), group)
        return gradients(model)

    exact, plain = in_float64(model), copy.deepcopy(model)
    for own in (exact, plain):
        losses(own).backward()
    exact, plain = gradients(exact), gradients(plain)
    for found in on_ranks(model, 2, work, shares=[3, 7], gather="none"):
        for name, ours in found.items():
            bound = 2 * (plain[name] - exact[name]).abs().max() + 3e-6 * exact[name].abs().max()
            assert (ours - exact[name]).abs().max() <= bound, name


def test_steps_of_an_optimizer_keep_ranks_equal_and_close_to_one_rank():
    model, ids = build("llama"), texts(4, 31)

    def train(model, group=None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in ids.split(1):
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            if group is not None:
                kyklos.torch.sum_gradients(model.parameters(), group)
            optimizer.step()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    exact, plain = train(in_float64(model)), train(copy.deepcopy(model))
    results = on_ranks(model, 2, lambda model, handle, group: train(model, group), shares=[3, 7], gather="none")
    for name, right in exact.items():
        bound = 2 * (plain[name] - right).abs().max() + 3e-6 * right.abs().max()
        assert (results[0][name] - right).abs().max() <= bound, name
        assert torch.equal(results[0][name], results[1][name]), name
        assert (right - dict(model.named_parameters())[name]).abs().max() > 10 * bound, "the step changed nothing"


def test_adapters_learn_and_the_model_does_not():
    peft = pytest.importorskip("peft")
    model, ids = build("llama"), texts(2, 31)
    torch.manual_seed(5)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    results = on_ranks(model, 2, step(input_ids=ids, labels=ids), shares=[3, 7], gather="none")
    assert all("lora" in name for name in results[0][1])
    check(results, model, input_ids=ids, labels=ids)


# -- refused ---------------------------------------------------------------------------------------------------------------


def refused(model, size, pattern, error=kyklos.RequestError, backward=False, **inputs):
    def work(model, handle, group):
        if backward:
            loss = model(**inputs).loss
            with pytest.raises(error, match=pattern):
                loss.backward()
        else:
            with pytest.raises(error, match=pattern):
                model(**inputs)
        ones = torch.ones(1, 8, 1, 8)
        group.attend(ones, ones, ones, layout="bshd", label="after")

    return functools.partial(on_ranks, model, size, work)


def test_passes_without_gradients_raise_in_backward():
    ids = texts(1, 12)
    cached = {"input_ids": ids, "labels": ids, "use_cache": True}
    refused(build("llama"), 2, "with a cache has no gradients: pass use_cache=False", NotImplementedError, True, **cached)()
    few = {"input_ids": ids[:, :2], "labels": ids[:, :2]}
    refused(build("llama"), 3, "fewer tokens than ranks, has no gradients", NotImplementedError, True, **few)()


def test_losses_that_a_rank_cannot_split_are_refused():
    ids = texts(1, 12)
    few = {"input_ids": ids[:, :2], "labels": ids[:, :2]}
    refused(build("llama"), 3, "each rank needs tokens of its own", **few)(gather="none")
    kept = {"input_ids": ids, "labels": ids, "logits_to_keep": 1}
    refused(build("llama"), 2, "leave out logits_to_keep", **kept)(gather="none")
    settings = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build_class("BertForTokenClassification", "BertConfig", {**settings, "num_labels": 5})
    inputs = {"input_ids": ids, "labels": ids % 5}
    refused(model, 2, "only the loss of the next token is split", **inputs)(gather="none")


def test_other_labels_on_a_rank_are_an_error_on_all():
    ids = texts(1, 12)

    def work(model, handle, group):
        with pytest.raises(kyklos.RequestError, match="label"):
            model(input_ids=ids, labels=texts(1, 12, seed=group.rank))

    on_ranks(build("llama"), 2, work, gather="none")


# -- processes -------------------------------------------------------------------------------------------------------------


def rank_of_two(rank, folder):
    """One rank of two, as a process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, ids = build("llama"), texts(2, 31)
    with kyklos.Group.from_torch(device="cpu", join_deadline_s=60, deadline_s=60) as group:
        handle = kyklos.transformers.parallelize(model, group, shares=[3, 7], gather="none")
        torch.save((*step(input_ids=ids, labels=ids)(model, handle, group), group.network), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path):
    context = torch.multiprocessing.spawn(rank_of_two, (str(tmp_path),), nprocs=2, join=False)
    try:
        # join() returns when one of them has ended.
        assert context.join(timeout=120) or context.join(timeout=30)
    finally:
        for process in context.processes:
            process.kill()
    *results, networks = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True)
    assert all("udp" in network.lower() for network in networks)
    ids = texts(2, 31)
    check(list(zip(*results, strict=True)), build("llama"), input_ids=ids, labels=ids)
