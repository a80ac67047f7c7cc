"""Tensors of PyTorch where a group reads them in place."""

from __future__ import annotations

import sys

import torch

from .._group import Group


def readable(group: Group, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The ``tensors`` where ``group`` reads them: on its device of PyTorch; on the NVIDIA GPU of this rank if all of them are there;
    otherwise in host memory. Gradients flow back."""
    if group.torch_device is not None:
        return [tensor.to(group.torch_device) for tensor in tensors]
    if all(_on_gpu_of(group, tensor) for tensor in tensors):
        return [tensor if _in_place(tensor) else tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return [tensor.to("cpu") for tensor in tensors]


def readable_bias(group: Group, bias: torch.Tensor) -> torch.Tensor:
    """A bias where ``group`` reads it: numbers also on its GPU, if their rows end on a 4-byte boundary; a mask in host memory."""
    if bias.is_floating_point() and bias.shape[-1] * bias.element_size() % 4 == 0:
        return readable(group, bias)[0]
    return bias.to("cpu")


def _on_gpu_of(group: Group, tensor: torch.Tensor) -> bool:
    device = tensor.device
    return device.type == "cuda" and torch.version.hip is None and device.index == group.gpu


def _in_place(tensor: torch.Tensor) -> bool:
    """Whether kernels can read a tensor of a GPU: elements of a head are adjacent, no elements are shared, rows begin at multiples
    of 4 bytes, and the first element at one of 16."""
    size = tensor.element_size()
    strides = [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]
    if tensor.shape[-1:].numel() > 1 and strides[-1:] != [1]:
        return False
    rows = strides[:-1] if tensor.shape[-1:].numel() > 1 else strides
    aligned = int(tensor.storage_offset()) * size % 16 == 0 and all(stride * size % 4 == 0 for stride in rows)
    return aligned and 0 not in strides


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is spread over processes, as weights of ``fully_shard`` are."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))
