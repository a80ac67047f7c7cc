"""``Trainer`` of transformers with a split model."""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from .._errors import RequestError
from .._models.telling import told
from .._rows import gather
from ..torch import sum_gradients
from ._split import SplitModel


def prepare(split: SplitModel, trainer: Any) -> None:
    """Makes a ``Trainer`` of transformers, which believes to be alone, train with the gradients and losses of all ranks. Rank 0 saves and
    reports."""
    group, args = split.group, trainer.args
    with told(group):
        if trainer.model is not split.model:
            raise RequestError("a Trainer of another model: make it with the model that was split")
        if args.world_size != 1:
            raise RequestError(
                f"a Trainer of {args.world_size} processes, which gives each of them other texts and divides their gradients: start the ranks with "
                "kyklos launch, or otherwise without torchrun's variables"
            )
        if args.n_gpu > 1:
            raise RequestError(f"a Trainer with {args.n_gpu} GPUs: set CUDA_VISIBLE_DEVICES to one for each rank")
        if trainer.label_smoother is not None and split.gather == "none":
            raise RequestError('label smoothing with gather="none": use gather="auto"')
    training_step, prediction_step = trainer.training_step, trainer.prediction_step
    of_one_rank = split.gather == "none"

    def train(model: torch.nn.Module, *given: Any, **options: Any) -> torch.Tensor:
        loss = training_step(model, *given, **options)
        if trainer.accelerator.sync_gradients:
            # Before they are clipped.
            sum_gradients(split.model.parameters(), group)
            for parameter in split.model.parameters() if not of_one_rank else ():
                if parameter.grad is not None:
                    parameter.grad /= group.size
        # Of one process, for the log.
        return gather(group, loss.float()[None, None, None], "loss").sum().to(loss) if of_one_rank else loss

    def predict(*given: Any, **options: Any) -> Any:
        # A metric is of all tokens.
        split.generating = True
        try:
            return prediction_step(*given, **options)
        finally:
            split.generating = False

    trainer.training_step, trainer.prediction_step = train, predict
    trainer.is_world_process_zero = trainer.is_local_process_zero = lambda: group.rank == 0
    if group.rank > 0:
        trainer.save_model = trainer._save_checkpoint = lambda *_, **__: None
        for callback in (ProgressCallback, PrinterCallback):
            trainer.pop_callback(callback)
