"""What outputs of a transformer are like, and what that depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from .calls import Inputs, tensors_of

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_PLAIN = (type(None), bool, int, float, str)
# How far results of another order of sums may be apart in each layer, relative to their norm; and how much nearer they are to what they should be
# than to another prompt's.
_ROUNDING = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
_NEARER, _EQUAL = 4, 1e-6
# What layers of adapters know of them.
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


@dataclass(frozen=True)
class Form:
    """An output without its numbers."""

    spec: TreeSpec
    #: The types of tensors, and other leaves as they are; the shapes of tensors, and nothing.
    leaves: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(output: Any) -> Form:
        leaves, spec = tree_flatten(output)
        kept = tuple(leaf.dtype if isinstance(leaf, torch.Tensor) else leaf if isinstance(leaf, _PLAIN) else type(leaf) for leaf in leaves)
        return Form(spec, kept, tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in leaves))

    @property
    def can_travel(self) -> bool:
        return all(leaf in _TYPES if isinstance(leaf, torch.dtype) else isinstance(leaf, _PLAIN) for leaf in self.leaves)

    def has_entries(self, batch: int) -> bool:
        """Whether each tensor has the entries of the batch along its first axis."""
        tensors = (shape for shape, leaf in zip(self.shapes, self.leaves, strict=True) if isinstance(leaf, torch.dtype))
        return all(len(shape) > 0 and shape[0] == batch for shape in tensors)

    def entries(self, count: int) -> Form:
        shapes = (
            (count, *shape[1:]) if isinstance(leaf, torch.dtype) else shape
            for shape, leaf in zip(self.shapes, self.leaves, strict=True)
        )
        return Form(self.spec, self.leaves, tuple(shapes))


def key_of(transformer: torch.nn.Module, inputs: Inputs) -> tuple[Any, ...]:
    """What the form of an output depends on, and whether a way is right: inputs without the values of tensors, and the state of the
    transformer."""
    kinds = tuple((name, _kind(x)) for name, x in inputs.items())
    device = next((x.device.type for x in tensors_of(inputs)), "cpu")
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return kinds, autocast, hash(tuple(map(_state, transformer.modules())))


def _kind(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.dtype
    if isinstance(x, (list, tuple)):
        return type(x), tuple(map(_kind, x))
    if isinstance(x, dict):
        return tuple((key, _kind(value)) for key, value in x.items())
    return x if isinstance(x, _PLAIN) else type(x)


def _state(module: torch.nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    adapters = tuple(repr(own[name]) for name in _ADAPTERS if name in own)
    hooks = tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
    dtypes = tuple(parameter.dtype for parameter in module.parameters(recurse=False))
    versions = tuple(_version(parameter) for parameter in module.parameters(recurse=False))
    return id(own.get("forward")), id(own.get("processor")), module.training, *hooks, adapters, dtypes, versions


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def is_near(got: Any, expected: Any, other: Any = None) -> bool:
    """Whether outputs are alike but for rounding, and ``got`` is much nearer to ``expected`` than that to ``other``."""
    pairs = list(zip(tensors_of(got), tensors_of(expected), strict=True))
    if not all(_distance([a], [b]) <= _ROUNDING[b.dtype] * _norm([b]) for a, b in pairs):
        return False
    off = _distance([a for a, _ in pairs], [b for _, b in pairs])
    if other is None or off <= _EQUAL * _norm([b for _, b in pairs]):
        return True
    return _NEARER * off <= _distance(list(tensors_of(other)), [b for _, b in pairs])


def has_right_entries(got: Any, expected: Any, batch: int) -> bool:
    """Whether each entry of an output is alike but for rounding, and much nearer to what it should be than other entries are."""
    for entry in range(batch):
        own, right, others = ([x[at] for x in tensors_of(output)] for output, at in ((got, entry), (expected, entry), (expected, entry - 1)))
        if not is_near(own, right, others if batch > 1 else None):
            return False
    return True


def _distance(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    if any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return float("inf")
    return _norm([x.double() - y.double() for x, y in zip(a, b, strict=True)])


def _norm(x: Sequence[torch.Tensor]) -> float:
    return sum(part.double().square().sum().item() for part in x) ** 0.5
