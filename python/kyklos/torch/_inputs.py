"""The arguments of the PyTorch operator: what is wrong with them, masks and biases of all shapes, and numbers."""

from __future__ import annotations

import numbers

import torch

from .._errors import RequestError
from .._group import Group


class Wrong(Exception):
    """Wrong arguments of a call. All ranks learn about it: otherwise their next calls would meet another one of this rank. Compiled
    code, in which no call of a group can be made, has an operator that refuses when its turn comes."""

    def __init__(self, fault: str, remedy: str, kind: type[Exception] = RequestError) -> None:
        super().__init__(fault, remedy, kind)
        self.fault, self.remedy, self.kind = fault, remedy, kind

    def refused(self, group: Group) -> Exception:
        """The exception of this rank, after a vote."""
        error = group.refuse(self.fault, self.remedy)
        if self.kind is RequestError:
            return error
        of_kind = self.kind(str(error))
        of_kind.told = True  # type: ignore[attr-defined]
        return of_kind


def of_keys(mask: torch.Tensor, q: torch.Tensor, layout: str) -> torch.Tensor:
    """A mask of two axes, if they can only be ``[batch, keys]``. ``F.scaled_dot_product_attention`` has ``[tokens, keys]``."""
    batch, tokens = q.shape[0], q.shape[2 if layout == "bhsd" else 1]
    remedy = "pass [batch, keys] as key_bias, and [tokens, keys] as mask[None, None]"
    if layout == "bshd":
        remedy = "pass [batch, keys] as key_bias, and [tokens, keys] as mask[None, :, None]"
    rows = mask.shape[0]
    if rows == batch == tokens and rows != 1:
        raise Wrong(f"a mask of two axes, {rows} rows, for {batch} batch entries and {tokens} tokens, is ambiguous", remedy)
    if rows not in (1, batch):
        raise Wrong(f"a mask of two axes is [batch, keys], and has {rows} rows for {batch} batch entries", remedy)
    return mask


def with_rows(bias: torch.Tensor, q: torch.Tensor, layout: str) -> torch.Tensor:
    """A bias of four axes with a row for each query: one of 1 row has the same for all."""
    axis = 2 if layout == "bhsd" else 1
    if bias.dim() != 4 or bias.shape[axis] != 1 or q.dim() != 4 or q.shape[axis] == 1:
        return bias
    shape = list(bias.shape)
    shape[axis] = q.shape[axis]
    return bias.expand(shape)


def amount(name: str, value: float | None) -> torch.Tensor | None:
    """A number for the operator, as a tensor: compiled code is then the same for all numbers."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor) or not isinstance(value, (int, float, numbers.Real)):
        raise Wrong(f"a {name} of type {type(value).__name__}", "pass a number; it has no gradient", TypeError)
    # Of the ways to make this tensor, the compiler keeps only a product for all numbers.
    return torch.ones((), dtype=torch.float64, device="cpu") * value
