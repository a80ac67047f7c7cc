"""The layers of a VAE that look at other rows, computed from the rows of one rank.

All others, such as activations, norms over channels and caches of frames, have the same result for a row whatever rows are beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..._errors import RequestError
from .band import ALONE, Band

# Channels times batch entries whose moments are computed at once where elements have 16 bits.
_AT_ONCE = 8


class Layers(TorchFunctionMode):
    """Within it functions of PyTorch on the rows of this rank give the rows of the result that they give on the whole."""

    def __init__(self, band: Band) -> None:
        super().__init__()
        self.band = band
        #: Of the last convolution's output: frames and rows times columns, to tell tokens of an image from those of a pixel's frames.
        self._frames = self._pixels = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        run = _RUN.get(func)
        if run is None:
            return func(*args, **(kwargs or {}))
        return run(self, func, *args, **(kwargs or {}))

    def pad(self, func: Any, x: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
        """Rows of the neighbours, and what ``mode`` says at the edges of the image."""
        if x.dim() < 4 or len(pad) < 4 or not any(pad[2:4]):
            return func(x, pad, mode, value)
        if mode == "circular" or min(pad[2:4]) < 0:
            raise _unknown("padding of rows that is circular or negative")
        above, below = self.band.borders(x, *pad[2:4])
        edges = [pad[2] if above is None else 0, pad[3] if below is None else 0]
        x = torch.cat([part for part in (above, x, below) if part is not None], -2)
        return func(x, [*pad[:2], *edges, *pad[4:]], mode, value)

    def convolution(
        self,
        func: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        steps, spread = _each(stride, weight), _each(dilation, weight)
        if isinstance(padding, str):
            widths = [0 if padding == "valid" else d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
            padding = [width // 2 for width in widths]
            if any(width % 2 for width in widths):
                raise _unknown("padding='same' of an even kernel")
        pads = _each(padding, weight)
        rows, reach, height = pads[-2], spread[-2] * (weight.shape[-2] - 1), input.shape[-2]
        inner = [*pads[:-2], 0, pads[-1]]
        if rows == 0:
            found = func(input, weight, bias, steps, pads, spread, groups)
        else:
            above, below = self.band.borders(input, rows, rows)
            if steps[-2] == 1 and reach == 2 * rows <= height:
                # Rows whose windows reach beyond this rank are computed again: that takes less memory than a copy with more rows.
                found = func(input, weight, bias, steps, pads, spread, groups)
                first, last = input[..., :reach, :], input[..., height - reach :, :]
                for at, border in (0, [above, first]), (height - rows, [last, below]):
                    parts = [part for part in border if part is not None]
                    if len(parts) == 2:
                        found.narrow(-2, at, rows).copy_(func(torch.cat(parts, -2), weight, bias, steps, inner, spread, groups))
            else:
                edge = input.new_zeros(*input.shape[:-2], rows, input.shape[-1])
                x = torch.cat([edge if above is None else above, input, edge if below is None else below], -2)
                found = func(x, weight, bias, steps, inner, spread, groups)
            if found.shape[-2] * steps[-2] != height:
                raise _unknown(f"a convolution that makes {found.shape[-2]} rows of {height}")
        self._frames, self._pixels = found.shape[-3] if found.dim() == 5 else 1, math.prod(found.shape[-2:])
        return found

    def transposed(
        self,
        func: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        dilation: int | Sequence[int] = 1,
    ) -> torch.Tensor:
        """A transposed convolution whose outputs do not overlap."""
        step, edge, extra, spread = (_each(given, weight)[-2] for given in (stride, padding, output_padding, dilation))
        if (step, edge, extra, spread) != (weight.shape[-2], 0, 0, 1):
            raise _unknown("a transposed convolution whose outputs overlap")
        return func(input, weight, bias, stride, padding, output_padding, groups, dilation)

    def average(
        self, func: Any, input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """An average pool whose windows do not overlap."""
        kernel = _rows_of(kernel_size)
        if _rows_of(stride or kernel_size) != kernel or _rows_of(padding) or input.shape[-2] % kernel:
            raise _unknown("an average pool whose windows overlap")
        return func(input, kernel_size, stride, padding, *args, **kwargs)

    def interpolate(
        self, func: Any, input: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        found = func(input, size, scale_factor, mode, *args, **kwargs)
        if input.dim() < 4:
            return found
        before, after = input.shape[-2], found.shape[-2]
        if before != after and (mode not in ("nearest", "nearest-exact") or (before % after and after % before)):
            raise _unknown(f"interpolation ({mode}) of {before} rows to {after}")
        return found

    def group_norm(
        self,
        func: Any,
        input: torch.Tensor,
        num_groups: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if input.dim() < 3 or input.dim() == 3 and not self._is_image(input.shape[2]):
            return func(input, num_groups, weight, bias, eps)
        batch, channels = input.shape[:2]
        flat = input.reshape(batch * num_groups, -1)
        # Elements of 16 bits are summed in float32, a few groups at a time.
        step = _AT_ONCE if flat.element_size() < 4 else len(flat)
        moments = [torch.stack(torch.var_mean(part.float(), 1, correction=0)) for part in flat.split(step)]
        var, mean = torch.cat(moments, 1)
        mean, var = (
            x.reshape(batch, num_groups, 1).expand(-1, -1, channels // num_groups).flatten().to(input.device, torch.float32)
            for x in self.band.moments(mean, var)
        )
        # A batch norm with given moments is the kernel that normalises in one pass.
        weight, bias = (None if x is None else x.float().repeat(batch) for x in (weight, bias))
        normal = F.batch_norm(input.reshape(1, batch * channels, -1), mean, var, weight, bias, eps=eps)
        return normal.reshape(input.shape)

    def attention(
        self,
        func: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        tokens = query.shape[-2]
        if not self._is_image(tokens):
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if dropout_p or is_causal or query.dim() > 4 or key.shape[-2] != tokens:
            raise _unknown("attention over pixels that is causal, cross-attention, or has dropout")
        extra = (1,) * (4 - query.dim())
        q, k, v = (x.reshape(*extra, *x.shape) for x in (query, key, value))
        attend = functools.partial(self.band.attend, scale=query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is None:
            return attend(q, k, v).reshape(*query.shape[:-1], value.shape[-1])
        visible = _frames_of(attn_mask, tokens // self._pixels)
        q, k, v = (x.unflatten(2, (-1, self._pixels)) for x in (q, k, v))
        parts = [attend(q[:, :, frame], *(x[:, :, seen].flatten(2, 3) for x in (k, v))) for frame, seen in enumerate(visible)]
        return torch.cat(parts, 2).reshape(*query.shape[:-1], value.shape[-1])

    def refused(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise _unknown(func.__name__)

    def batch_norm(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("training", args[5] if len(args) > 5 else False):
            raise _unknown("batch_norm in training")
        return func(*args, **kwargs)

    def _is_image(self, tokens: int) -> bool:
        """Whether an axis of so many elements has all pixels of this rank, of one frame or of all frames; else those of a pixel.

        :raises RequestError: on all ranks, if that cannot be told on some of them.
        """
        own = self.band.counts[self.band.group.rank]
        if tokens == self._frames > 1 and any(self._pixels * count in (own, tokens * own) for count in self.band.counts):
            raise _unknown(f"an axis of {tokens} tokens, where a frame has one pixel on some rank, or as many pixels as there are frames")
        return tokens in (self._pixels, self._pixels * self._frames)


def _unknown(what: str) -> RequestError:
    return RequestError(f"the VAE has {what}, whose rows on several ranks are not known: {ALONE}")


def _each(given: Any, weight: torch.Tensor) -> list[int]:
    """One number for each axis of a kernel."""
    return [given] * (weight.dim() - 2) if isinstance(given, int) else list(given) * (weight.dim() - 2 if len(given) == 1 else 1)


def _rows_of(given: Any) -> int:
    """Of one number, or one for each axis, that of the rows."""
    return given if isinstance(given, int) else given[-2 if len(given) > 1 else 0]


def _frames_of(mask: torch.Tensor, frames: int) -> list[list[int]]:
    """For each frame those that it sees, if a mask ``[..., tokens, tokens]`` is the same for all pixels of a frame and for the whole batch."""
    blocks = mask.unflatten(-1, (frames, -1)).unflatten(-3, (frames, -1))
    firsts = blocks[..., :1, :, :1]
    seen = firsts if mask.dtype == torch.bool else firsts == 0
    if not (blocks == firsts).all() or not (seen | (firsts == -math.inf)).all():
        raise _unknown("an attention mask that is not one of frames")
    seen = seen.reshape(-1, frames, frames)
    if not (seen == seen[:1]).all():
        raise _unknown("an attention mask that differs between batch entries or heads")
    return [row.nonzero().flatten().tolist() for row in seen[0].cpu()]


_RUN: dict[Any, Callable[..., torch.Tensor]] = {
    F.pad: Layers.pad,
    F.conv2d: Layers.convolution,
    F.conv3d: Layers.convolution,
    F.conv_transpose2d: Layers.transposed,
    F.conv_transpose3d: Layers.transposed,
    F.avg_pool2d: Layers.average,
    F.avg_pool3d: Layers.average,
    F.interpolate: Layers.interpolate,
    F.group_norm: Layers.group_norm,
    F.batch_norm: Layers.batch_norm,
    F.scaled_dot_product_attention: Layers.attention,
    **dict.fromkeys(
        (
            F.max_pool2d,
            F.max_pool3d,
            F.adaptive_avg_pool2d,
            F.adaptive_avg_pool3d,
            F.adaptive_max_pool2d,
            F.instance_norm,
            F.grid_sample,
            F.unfold,
            F.fold,
        ),
        Layers.refused,
    ),
}
