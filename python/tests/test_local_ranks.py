"""Devices of the ranks of one machine."""

import threading
import warnings

import pytest
import torch

import kyklos
from kyklos._device import accelerator
from kyklos._models.execution import warn_of_copies


def test_ranks_take_the_accelerators_of_pytorch_in_turn(monkeypatch):
    current = 0
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    assert [accelerator(rank, True) for rank in range(3)] == [("cuda:0", 2), ("cuda:1", 2), ("cuda:0", 2)]
    # torch.cuda.set_device(1)
    current = 1
    assert accelerator(0, True) == ("cuda:1", 2)
    # A kind without kernels of its vendor is not the default, but has a name.
    current = 0
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert (accelerator(1, True), accelerator(1, False)) == (None, ("mps:1", 2))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert accelerator(0, False) is None


def connected(size, local_size, device):
    """The warnings of ranks that a launcher of one's own has started on one machine."""
    pems, port = kyklos.identities(size), kyklos._kyklos.free_port("127.0.0.1")
    names, errors = [None] * size, []

    def run(rank):
        try:
            with kyklos.Group.connect(
                pems[rank], rank=rank, size=size, host="127.0.0.1", port=port, local_rank=rank, local_size=local_size, device=device
            ) as group:
                names[rank] = group.device
        except BaseException as error:
            errors.append(error)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return names, [str(warning.message) for warning in caught if "ranks of this machine" in str(warning.message)]


def test_ranks_that_share_a_gpu_are_told():
    try:
        kyklos.Group.local(1, device="wgpu")[0].close()
    except (kyklos.DeviceError, kyklos.RequestError) as fault:
        pytest.skip(f"no GPU: {fault}")
    names, told = connected(2, 2, "wgpu")
    # A machine with more GPUs gives each rank one.
    assert told == (["2 ranks of this machine share 1 GPU, and take turns on it: start one rank for each GPU"] if names[0] == names[1] else [])
    assert connected(2, 2, "wgpu:0")[1] == connected(2, 2, "cpu")[1] == []


def test_a_model_on_another_device_than_attention_is_told(monkeypatch):
    with kyklos.Group.local(1, device="cpu")[0] as group:
        model = torch.nn.Linear(2, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_copies(group, model)
            warn_of_copies(group, torch.nn.Linear(2, 2, device="meta"))
        monkeypatch.setattr(model, "parameters", lambda: iter([torch.nn.Parameter(torch.empty(1))]))
        monkeypatch.setattr(torch.nn.Parameter, "device", property(lambda _: torch.device("cuda:1")), raising=False)
        with pytest.warns(UserWarning, match='form the group with device="torch:cuda:1"'):
            warn_of_copies(group, model)
