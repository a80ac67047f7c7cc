"""A text as a QR code."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Pixels of a module of the code, and modules of white around it: cameras want four.
MODULE_PIXELS = 8
BORDER_MODULES = 4


def code(text: str) -> Any:
    """The code, which survives that 15 % of it cannot be read."""
    import segno

    return segno.make(text, error="m", micro=False)


def image(text: str) -> torch.Tensor:
    """An image of ComfyUI: ``[1, height, width, 3]`` in f32, 0 is black and 1 is white."""
    import torch

    rows = [[1.0 - dark for dark in row] for row in code(text).matrix_iter(scale=MODULE_PIXELS, border=BORDER_MODULES)]
    return torch.tensor(rows)[None, :, :, None].expand(-1, -1, -1, 3).contiguous()


def save_preview(text: str, folder: str) -> str:
    """Writes the code as a PNG into a folder and returns its name, which nobody can guess."""
    os.makedirs(folder, exist_ok=True)
    name = f"kyklos_invitation_{uuid.uuid4().hex}.png"
    code(text).save(os.path.join(folder, name), scale=MODULE_PIXELS, border=BORDER_MODULES)
    return name
