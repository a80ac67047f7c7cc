"""Arrays of the libraries that callers use."""

from __future__ import annotations

from typing import Any

from . import _kyklos


def records_gradients(array: Any) -> bool:
    if not getattr(array, "requires_grad", False) or type(array).__module__.partition(".")[0] != "torch":
        return False
    import torch

    return torch.is_grad_enabled()


def like(model: Any, array: _kyklos.Array) -> Any:
    """``array`` as an array of the library of ``model``, without a copy."""
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
