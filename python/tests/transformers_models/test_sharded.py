"""Models whose weights ``fully_shard`` (FSDP2) shards over processes, and whose tokens Kyklos splits over the same ones."""

import copy
import sys
from pathlib import Path

import pytest
import test_diffusers_training as denoisers
import test_transformers_training as decoders
import torch
import torch.distributed as dist
import torch.multiprocessing
from split_models import case
from tiny_models import build, in_float64, texts
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kyklos
import kyklos.diffusers
import kyklos.torch
import kyklos.transformers
from kyklos._models import weights

pytest.importorskip("peft", reason="peft is not installed")
sys.path.append(str(Path(__file__).parents[2] / "examples"))
import train_sharded as example

SHARES = {2: (3, 7), 3: (2, 1, 5)}


def sharded(model, layers, mesh=None):
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(gradients):
    return {name: one.full_tensor() for name, one in gradients.items()}


def adapters(group):
    """Losses and norms of three steps of the example, and its weights after them."""
    model = example.make_model()
    example.split(model, group, shares=SHARES[group.size])
    steps = list(example.train(model, texts(3, 31)[:, None], group))
    return steps, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def all_weights(group, gather):
    """The loss and the gradients of a step in which all weights learn, after another one that has changed them."""
    model, ids = build("llama"), texts(2, 31)
    kyklos.transformers.parallelize(model, group, shares=SHARES[group.size], gather=gather)
    sharded(model, model.model.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        # The first module is whole while it computes, in buffers whose places and versions tell nothing.
        patch.setattr(weights, "exchange", lambda *_: pytest.fail("sharded weights are compared"))
        for batch in (texts(2, 31, seed=2), ids):
            optimizer.step()
            optimizer.zero_grad()
            loss = model(input_ids=batch, labels=batch).loss
            (loss * group.size if gather == "none" else loss).backward()
    found = whole(decoders.gradients(model))
    text = model.generate(ids[:1], max_new_tokens=8, do_sample=False)
    total = sum(decoders.group_losses(group, loss)) if gather == "none" else loss.detach()
    with pytest.raises(kyklos.RequestError, match=r"sharded \(DTensor\): leave them out"):
        kyklos.torch.sum_gradients(model.parameters(), group)
    return total, found, text


def all_weights_beside_copies(group):
    """As :func:`all_weights`, of a model that each rank has whole, whose gradients DistributedDataParallel divides."""
    model, ids = build("llama"), texts(2, 31)
    kyklos.transformers.parallelize(model, group, shares=SHARES[group.size], gather="none")
    # Its hooks end with it.
    replicated = DistributedDataParallel(model)
    loss = replicated(input_ids=ids, labels=ids).loss
    (loss * group.size).backward()
    return sum(decoders.group_losses(group, loss)), decoders.gradients(model), None


def denoiser(group):
    """The gradients of a diffusion transformer. Each rank has the whole loss, of which fully_shard takes the mean."""
    (model,) = case("Wan").copies(1)
    with kyklos.diffusers.parallelize(model, group, shares=SHARES[group.size]):
        sharded(model, model.blocks)
        denoisers.loss_of(model, case("Wan").inputs).backward()
        return whole(denoisers.gradients(model))


def refused(group):
    """Weights that are sharded before the tokens are split."""
    decoder, (denoiser,) = build("llama"), case("Wan").copies(1)
    messages = []
    for parallelize, model, layers in (
        (kyklos.transformers.parallelize, decoder, decoder.model.layers),
        (kyklos.diffusers.parallelize, denoiser, denoiser.blocks),
    ):
        with pytest.raises(kyklos.RequestError) as error:
            parallelize(sharded(model, layers), group)
        messages.append(str(error.value))
    return messages


def rank_of(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    with kyklos.Group.from_torch(device="cpu", join_deadline_s=60, deadline_s=60) as group:
        found = {
            "adapters": adapters(group),
            "none": all_weights(group, "none"),
            "auto": all_weights(group, "auto"),
            "copies": all_weights_beside_copies(group),
            "denoiser": denoiser(group),
            "refused": refused(group),
        }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def rank_of_two_groups(rank, size, folder):
    """Two groups of two ranks, with a text each; weights are sharded over all four."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("texts", "tokens"))
    model, own = build("llama"), texts(2, 31)[rank // 2, None]
    with kyklos.Group.from_torch(mesh["tokens"].get_group(), device="cpu", join_deadline_s=60, deadline_s=60) as group:
        kyklos.transformers.parallelize(model, group, shares=SHARES[2], gather="none")
        sharded(model, model.model.layers, mesh._flatten())
        loss = model(input_ids=own, labels=own).loss
        (loss * group.size).backward()
        total = loss.detach() * group.size
        dist.all_reduce(total)
        torch.save((total / size, whole(decoders.gradients(model))), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def processes(function, size, folder):
    """What ``function(rank, size, folder)`` has saved in ``folder``, by rank."""
    context = torch.multiprocessing.spawn(function, (size, str(folder)), nprocs=size, join=False)
    try:
        # It returns when one of them has ended.
        assert any(context.join(timeout=200) for _ in range(size + 1))
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module", params=SHARES)
def ranks(request, tmp_path_factory):
    return processes(rank_of, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
def test_adapters_learn_what_they_learn_on_one_process(ranks):
    def alone(model):
        return list(example.train(model, texts(3, 31)[:, None]))

    exact, plain = in_float64(example.make_model()), example.make_model()
    want, rounded = alone(exact), alone(plain)
    for found in ranks:
        for ours, theirs, one in zip(found["adapters"][0], want, rounded, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5), (ours, theirs, one)
    # They do learn.
    assert want[2] != pytest.approx(want[0], rel=1e-2)
    learned = ranks[0]["adapters"][1]
    first = dict(example.make_model().named_parameters())
    assert {name for name, one in first.items() if not torch.equal(learned[name], one)} == {name for name in first if "lora" in name}
    with torch.no_grad():
        for name, one in exact.named_parameters():
            # A gradient that is nearly 0 moves its element either way, so not each element is compared.
            assert (learned[name] - one).norm() <= 0.02 * (one - first[name]).norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "auto", "copies"])
def test_gradients_of_all_weights(ranks, how):
    model, ids = build("llama"), texts(2, 31)
    if how != "copies":
        torch_step(model, texts(2, 31, seed=2))
    results = [found[how][:2] for found in ranks]
    decoders.check(results, model, input_ids=ids, labels=ids)
    if how != "copies":
        text = copy.deepcopy(model).generate(ids[:1], max_new_tokens=8, do_sample=False)
        assert all(torch.equal(found[how][2], text) for found in ranks)


def torch_step(model, batch):
    """The first step of :func:`all_weights`, on one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
def test_the_comparison_sees_a_factor(ranks):
    model, ids = build("llama"), texts(2, 31)
    (loss, gradients, _) = ranks[0]["copies"]
    half = {name: one / len(ranks) for name, one in gradients.items()}
    with pytest.raises(AssertionError):
        decoders.check([(loss, half)], model, input_ids=ids, labels=ids)


@pytest.mark.slow
def test_gradients_of_a_denoiser(ranks):
    denoisers.check([found["denoiser"] for found in ranks], case("Wan"))


@pytest.mark.slow
def test_weights_that_are_sharded_first_are_refused(ranks):
    for found in ranks:
        assert all("sharded" in message and "call parallelize() first" in message for message in found["refused"])


@pytest.mark.slow
def test_two_groups_with_a_text_each(tmp_path):
    ids = texts(2, 31)
    decoders.check(processes(rank_of_two_groups, 4, tmp_path), build("llama"), input_ids=ids, labels=ids)
