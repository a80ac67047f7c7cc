"""``Trainer`` of transformers with a split model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import EarlyStoppingCallback, PrinterCallback, ProgressCallback

from .._errors import RequestError
from .._models.telling import told
from .._rows import gather
from ..torch import sum_gradients
from ._hooks import Undo, replace
from ._split import SplitModel
from ._stacks import SplitStacks


def prepare(split: SplitModel | SplitStacks, trainer: Any, undo: Undo) -> None:
    """Makes a ``Trainer`` of transformers, which believes to be alone, train with the gradients and losses of all ranks, until the functions of
    ``undo`` are called. Rank 0 saves and reports."""
    group = split.group
    with told(group):
        if not isinstance(trainer, Trainer):
            raise RequestError(f"a {type(trainer).__name__} is no Trainer of transformers: pass the Trainer of the split model")
        args = trainer.args
        if isinstance(trainer.__dict__.get("training_step"), functools.partial):
            raise RequestError("a Trainer that is prepared already: call prepare_trainer() once")
        if trainer.model is not split.model:
            raise RequestError("a Trainer of another model: make it with the model that was split")
        if args.world_size != 1:
            raise RequestError(
                f"a Trainer of {args.world_size} processes, which gives each of them other texts and divides their gradients: start the ranks with "
                "kyklos launch, or otherwise without torchrun's variables"
            )
        if args.n_gpu > 1:
            raise RequestError(f"a Trainer with {args.n_gpu} GPUs: set CUDA_VISIBLE_DEVICES to one for each rank")
        if split.gather == "none" and (trainer.label_smoother is not None or trainer.compute_loss_func is not None):
            raise RequestError('label smoothing or a loss of its own with gather="none": use gather="auto"')
        if args.load_best_model_at_end or any(isinstance(one, EarlyStoppingCallback) for one in trainer.callback_handler.callbacks):
            raise RequestError(
                "a Trainer that looks at its metrics (load_best_model_at_end, EarlyStoppingCallback), which ranks may round in other ways: "
                "leave it out, and choose among the checkpoints of rank 0"
            )
    replace(trainer, "training_step", functools.partial(_train, split, trainer, trainer.training_step), undo)
    replace(trainer, "prediction_step", functools.partial(_predict, split, trainer.prediction_step), undo)
    for name in ("is_world_process_zero", "is_local_process_zero"):
        replace(trainer, name, lambda: group.rank == 0, undo)
    if group.rank > 0:
        for name in ("save_model", "_save_checkpoint"):
            replace(trainer, name, lambda *_, **__: None, undo)
        for callback in (ProgressCallback, PrinterCallback):
            trainer.pop_callback(callback)


def _train(split: SplitModel | SplitStacks, trainer: Any, step: Callable[..., torch.Tensor], *given: Any, **options: Any) -> torch.Tensor:
    loss = step(*given, **options)
    of_one_rank = split.gather == "none"
    if trainer.accelerator.sync_gradients:
        # Before they are clipped.
        sum_gradients(split.model.parameters(), split.group)
        for parameter in split.model.parameters() if not of_one_rank else ():
            if parameter.grad is not None:
                parameter.grad /= split.group.size
    # Of one process, for the log.
    return gather(split.group, loss.float()[None, None, None], "loss").sum().to(loss) if of_one_rank else loss


def _predict(split: SplitModel | SplitStacks, step: Callable[..., Any], *given: Any, **options: Any) -> Any:
    # A metric is of all tokens.
    before, split.generating = split.generating, True
    try:
        return step(*given, **options)
    finally:
        split.generating = before
