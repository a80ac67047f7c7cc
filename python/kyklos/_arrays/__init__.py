"""Arrays of the libraries that callers use."""

from __future__ import annotations

import sys
from typing import Any

from .. import _kyklos


def is_tensor(array: Any) -> bool:
    """Whether ``array`` is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def records_gradients(array: Any) -> bool:
    if not is_tensor(array) or not array.requires_grad:
        return False
    import torch

    return torch.is_grad_enabled()


def like(model: Any, array: _kyklos.Array) -> Any:
    """``array`` as an array of the library of ``model``, without a copy."""
    tensor = array.torch
    if tensor is not None:
        if tensor.device.type in ("cuda", "xpu"):
            import torch

            # Its memory is used again only after what the caller's stream does with it.
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))
        return tensor
    library = type(model).__module__.partition(".")[0]
    if library == "torch":
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(array)
    namespace = getattr(model, "__array_namespace__", None)
    if namespace is not None:
        return namespace().from_dlpack(array)
    if library == "numpy":  # Before NumPy 2, which has no namespace.
        import numpy

        return numpy.from_dlpack(array)
    return array
