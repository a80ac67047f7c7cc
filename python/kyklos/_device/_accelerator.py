"""PyTorch's accelerator, for the ranks of a machine."""

from __future__ import annotations

import torch

# Accelerators with an attention kernel of their vendor: `device="auto"` takes them.
_AUTO = ("cuda", "xpu")


def accelerator(local_rank: int, auto: bool) -> tuple[str, int] | None:
    """The name of the accelerator for the rank ``local_rank`` of this machine, and how many there are; ``None`` if there is none,
    or with ``auto`` none that ``device="auto"`` takes. It is the device that the program has chosen (``torch.cuda.set_device``); where
    that is number 0, ranks take them in turn."""
    if not torch.accelerator.is_available():
        return None
    kind, count = torch.accelerator.current_accelerator().type, torch.accelerator.device_count()  # type: ignore[union-attr]
    if auto and kind not in _AUTO:
        return None
    current = torch.accelerator.current_device_index()
    return f"{kind}:{current or local_rank % max(1, count)}", count
