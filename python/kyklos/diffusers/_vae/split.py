"""Calls of a VAE in parts, and the comparison with the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..._errors import GroupError, RequestError
from ..._group import Group
from ..._models.agreement import Passes
from ..._models.telling import told
from ..._rows import without_backward
from .._inputs import compare
from .._ways.shares import bounds, whole_numbers
from .band import ALONE, Band
from .layers import Layers

# The trial: columns and frames of its latents.
_COLUMNS, _FRAMES = 4, 3
# What configurations call the channels of latents.
_CHANNELS = ("latent_channels", "z_dim", "z_channels")
# Largest difference of a row, relative to the root mean square of all elements: of float32 and of 16-bit types.
_ROUNDING, _ROUNDING_16 = 1e-3, 0.1
_INPUTS = {"decode": "latents", "encode": "picture"}
#: An input of the comparison, and other arguments.
Trial = tuple[torch.Tensor, dict[str, Any]]


class Split:
    """One VAE on one rank."""

    def __init__(self, group: Group, name: str, shares: Sequence[float]) -> None:
        self.group, self.name = group, name
        self.passes = Passes(group)
        self._shares = whole_numbers(shares)
        #: The methods that are computed in parts. The rows of their inputs are cut at multiples of these.
        self.units: dict[str, int] = {}

    def call(self, vae: torch.nn.Module, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The whole result on each rank.

        :raises RequestError: inputs that differ between ranks, or cannot be split.
        """
        x, args, options = _image_of(args, options, f"{self.name}.{method}")
        self._check(vae, method, x, [*args, *options.values()])
        number = self.passes.next(vae, False)
        place = f"{self.passes.model}, {method} {number}"
        others = {f"argument {at} of {method}": arg for at, arg in enumerate(args, 1)}
        compare(self.group, {_INPUTS[method]: x, **others, **options}, place)
        unit = self.units[method]
        if x.shape[-2] % unit or x.shape[-2] // unit < self.group.size:
            raise RequestError(
                f"{self.name}.{method} of {x.shape[-2]} rows on {self.group.size} ranks, each with a multiple of {unit}: use fewer ranks, or another "
                "height"
            )
        cuts = bounds(x.shape[-2] // unit, self._shares)
        return self._parts(vae, method, x, args, options, [unit * (end - first) for first, end in zip(cuts, cuts[1:], strict=False)], place)

    def _parts(
        self,
        vae: torch.nn.Module,
        method: str,
        x: torch.Tensor,
        args: Sequence[Any],
        options: Mapping[str, Any],
        counts: Sequence[int],
        place: str,
    ) -> Any:
        band = Band(self.group, counts, place)
        learns = [tensor for tensor in (x, *vae.parameters()) if torch.is_grad_enabled() and tensor.requires_grad]
        with torch.no_grad(), Layers(band):
            result = getattr(type(vae), method)(vae, band.own(x).contiguous(), *args, **options)
        return _joined(band, result, learns[:1])

    def _check(self, vae: torch.nn.Module, method: str, x: torch.Tensor, others: Sequence[Any]) -> None:
        if x.dim() not in (4, 5):
            raise RequestError(f"{self.name}.{method} is called with {x.dim()} axes: give it images or videos, with 4 or 5 axes")
        if any(isinstance(other, torch.Tensor) and other.dim() > 3 for other in others):
            raise RequestError(f"{self.name}.{method} is called with a second image, which is not split: {ALONE}")
        if getattr(vae, "use_tiling", False):
            raise RequestError(
                f"{self.name} has tiling, which blends tiles at their seams: call disable_tiling(); a split VAE divides memory without seams"
            )
        parts = list(vae.modules())
        if vae.training and any(isinstance(part, torch.nn.Dropout) and part.p for part in parts):
            raise RequestError(f"{self.name} has dropout, which would differ between ranks: call eval(), or set its p to 0")
        if any(part._compiled_call_impl is not None or isinstance(part, torch._dynamo.OptimizedModule) for part in parts):
            raise RequestError(f"{self.name} has compiled parts, whose layers cannot be told apart: split it without torch.compile")

    def latents(self, vae: torch.nn.Module) -> list[Trial]:
        """Those of a video, also at a time, of an image, a video of one frame, and images that are a video. From row to row they are
        brighter and have more contrast, so that ranks have other statistics."""
        config = getattr(vae, "config", {})
        channels = next((config[name] for name in _CHANNELS if isinstance(config.get(name), int)), None)
        if channels is None:
            raise RequestError(f"the configuration of {self.name} does not say how many channels latents have: {ALONE}")
        rows = sum(self._trial_rows())
        z = torch.randn(1, channels, _FRAMES, rows, _COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.5
        height = torch.linspace(0.2, 1, rows)[:, None]
        parameter = next(vae.parameters())
        video = (z * height + height).to(parameter.device, parameter.dtype)
        images, time = video[0].transpose(0, 1), video.new_tensor([0.05])
        return [(video, {}), (video, {"temb": time}), (images[:1], {}), (video[:, :, :1], {}), (images, {"num_frames": _FRAMES})]

    def _trial_rows(self) -> list[int]:
        return [2 + rank % 2 for rank in range(self.group.size)]

    def verify(self, vae: torch.nn.Module, method: str, trials: Sequence[Trial]) -> torch.Tensor | str:
        """Computes ``method`` of the first input that it takes, whole and in parts, and takes it for known if both agree.

        :returns: the result, or why it is not known; on all ranks alike.
        """
        why, unit = "", 1
        whole = trials[0][0]
        try:
            with told(self.group):
                self._check(vae, method, whole, ())
                x, options, whole = self._first(vae, method, trials)
                unit = max(1, x.shape[-2] // whole.shape[-2])
                counts = [x.shape[-2] // sum(self._trial_rows()) * rows for rows in self._trial_rows()]
                found = _tensor_of(self._parts(vae, method, x, (), options, counts, f"{self.passes.model}, {method} in trial"))
            difference = _difference(found, whole)
            why = difference and f"{self.name}.{method} in parts is not what it is whole: {difference}"
        except GroupError:
            raise
        except Exception as error:
            why = str(error) if isinstance(error, RequestError) else f"{self.name}.{method}: {type(error).__name__}: {error}"
        verdicts = self.passes.compare([int(bool(why))], f"{method} verified")
        if any(failed for failed, *_ in verdicts):
            return why or f"{self.name}.{method} in parts is not what it is whole, on another rank: {ALONE}"
        self.units[method] = unit
        return whole

    def _first(self, vae: torch.nn.Module, method: str, trials: Sequence[Trial]) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
        """The first input that ``method`` takes, and its result."""
        faults = []
        for x, options in trials:
            try:
                with torch.no_grad():
                    return x, options, _tensor_of(getattr(type(vae), method)(vae, x, **options))
            except Exception as fault:
                faults.append(f"{list(x.shape)}: {type(fault).__name__}: {fault}")
        raise RequestError(f"{self.name}.{method} takes none of the inputs of its trial ({'; '.join(faults)}): {ALONE}")


def _image_of(args: tuple[Any, ...], options: dict[str, Any], name: str) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """The first argument, however it is given, and the others."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0], args[1:], options
    key = next((key for key, value in options.items() if isinstance(value, torch.Tensor)), None)
    if args or key is None:
        raise RequestError(f"{name} is called without a tensor: give it one as its first argument")
    return options[key], (), {other: value for other, value in options.items() if other != key}


def _joined(band: Band, result: Any, learns: Sequence[torch.Tensor]) -> Any:
    """``result`` with the rows of all ranks: tensors, distributions of latents, and outputs of diffusers that have them. It seems to have a gradient
    if one of ``learns`` has one, and ``backward()`` raises."""
    if result is None:
        return None
    if isinstance(result, torch.Tensor) and result.dim() > 3:
        found = band.whole(result)
        return without_backward(lambda *_: found, "a split VAE has no gradients: train it on one rank", *learns) if learns else found
    if isinstance(result, Mapping):
        return type(result)(**{name: _joined(band, part, learns) for name, part in result.items()})
    if isinstance(result, (tuple, list)):
        return type(result)(_joined(band, part, learns) for part in result)
    if isinstance(getattr(result, "parameters", None), torch.Tensor):
        return type(result)(_joined(band, result.parameters, learns))
    raise RequestError(f"a result with a {type(result).__name__}, which is not one of rows: {ALONE}")


def _tensor_of(result: Any) -> torch.Tensor:
    """The first tensor of a result."""
    while not isinstance(result, torch.Tensor):
        result = (
            result.parameters if hasattr(result, "parameters") else next(iter(result.values() if isinstance(result, Mapping) else result))
        )
    return result.detach()


def _difference(found: torch.Tensor, whole: torch.Tensor) -> str:
    """How two results ``[..., rows, columns]`` differ by more than rounding; empty if they do not."""
    if found.shape != whole.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(whole.shape)}"
    scale = whole.double().square().mean().sqrt()
    if not scale.isfinite():
        return f"it is not finite in {whole.dtype}; convert the VAE to float32"
    errors = (found.double() - whole.double()).square().movedim(-2, 0).flatten(1).mean(1).sqrt() / scale
    bound = _ROUNDING if whole.dtype == torch.float32 else _ROUNDING_16
    if (errors <= bound).all():
        return ""
    return f"row {int(errors.argmax())} of {len(errors)} differs by {float(errors.max()):.2g} of the root mean square; {ALONE}"
