"""A device whose memory is PyTorch's and whose kernels are PyTorch's: any device that PyTorch has.

The extension module calls :class:`Device` from the thread of a session, a few times for each step of a plan. Buffers are
one-dimensional uint8 tensors. A place in a buffer is ``(offset, batch, row, head)``: the first element and the strides of
``[batch, rows, heads, dim]``, in elements.
"""

from __future__ import annotations

from ._accelerator import accelerator
from ._device import Device

__all__ = ["Device", "accelerator"]
