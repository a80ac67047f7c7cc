"""The model around the body of a split one: its inputs, the rows that its head needs, and the loss of the rows of one rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from .._errors import RequestError
from .._models.telling import told
from ._hooks import Undo, replace
from ._split import SplitModel
from ._stacks import SplitStacks

# Targets that count for nothing.
_IGNORED = -100


def install(split: SplitModel | SplitStacks, undo: Undo) -> None:
    """Makes ``forward`` of a model with a head say how many rows the head needs, until the functions of ``undo`` are called."""
    if split.base is split.model:
        return
    run = split.model.forward
    names = list(inspect.signature(run).parameters)
    forward = functools.update_wrapper(functools.partial(_forward, split, run, names), run)
    replace(split.model, "forward", forward, undo)


def _forward(split: SplitModel | SplitStacks, run: Callable[..., Any], names: list[str], /, *args: Any, **kwargs: Any) -> Any:
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    keep, labels = given.get("logits_to_keep", 0), given.get("labels")
    targets = [name for name, value in given.items() if "label" in name and value is not None]
    split.keep = keep if isinstance(keep, int) and keep > 0 else 0
    split.labels = labels if isinstance(labels, torch.Tensor) else None
    split.outer = given
    try:
        with told(split.group):
            if targets and split.gather == "none" and not split.generating:
                return _with_own_loss(split, run, given, targets)
            return run(*args, **kwargs)
    finally:
        split.keep, split.labels, split.outer = 0, None, None


def _with_own_loss(split: SplitModel | SplitStacks, run: Callable[..., Any], given: dict[str, Any], targets: list[str]) -> Any:
    """A pass whose loss is this rank's part: the sum over its tokens, divided by the number of targets of all ranks.

    The target of a token is the next token, which may be on the next rank, so the targets are shifted before they are split.
    """
    model = split.model
    if targets != ["labels"] or model.loss_function is not ForCausalLMLoss:
        raise RequestError(
            f'{" and ".join(targets)} of {type(model).__name__} with gather="none": a rank has the logits of its tokens only, and '
            'only the loss of the next token is split; use gather="auto"'
        )
    labels = given["labels"]
    tokens = labels.shape[1]
    first, end = split.rows(tokens)
    if split.group.size > 1 and end - first == tokens:
        raise RequestError(
            f'labels of {tokens} tokens on {split.group.size} ranks with gather="none": each rank needs tokens of its own; pass '
            "longer texts"
        )
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    own = shifted[:, first:end].contiguous()
    calls = []

    def loss(
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        **others: Any,
    ) -> torch.Tensor:
        calls.append(logits)
        if logits.shape[:2] != own.shape:
            raise RequestError(
                f"labels of {own.shape[1]} tokens of this rank, and logits of {logits.shape[1]}: leave out logits_to_keep"
            )
        count = (shifted != ignore_index).sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        others = {**others, "shift_labels": own}
        return ForCausalLMLoss(logits, own, vocab_size, count, ignore_index, **others)

    before = model.__dict__.get("_loss_function")
    model.loss_function = loss
    try:
        output = run(**given)
    finally:
        if before is None:
            del model._loss_function
        else:
            model.loss_function = before
    if len(calls) != 1:
        raise RequestError(
            f'{type(model).__name__} computes its loss in another way than by loss_function, so gather="none" cannot split it: use '
            'gather="auto"'
        )
    return output
