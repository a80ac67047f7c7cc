"""Models of transformers whose sequence is split over the ranks of a group.

::

    import kyklos, kyklos.transformers

    with kyklos.Group.from_env() as group:
        handle = kyklos.transformers.parallelize(model, group)
        text = model.generate(**inputs, max_new_tokens=100)  # the same inputs on every rank

Every rank has the whole model and calls it with the same, whole inputs. It computes its part of the tokens, and the layers attend
to the tokens of all ranks. Weights are not split; the work and the memory of activations, and the cache of keys and values, are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._group import Group
from .._models.execution import execution, refuse_sharded, warn_of_copies
from .._models.telling import told
from . import _generate as generation
from . import _loss as loss
from . import _trainer as trainers
from ._cache import SplitCache
from ._split import SplitModel
from ._stacks import SplitStacks, stacks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Handle", "SplitCache", "parallelize"]


def parallelize(
    model: PreTrainedModel,
    group: Group,
    *,
    mesh: str | None = None,
    strategy: str | None = None,
    wire: str | None = None,
    shares: str | Sequence[float] | None = None,
    gather: str = "auto",
    check: bool = True,
) -> Handle:
    """Splits the sequence of ``model`` over the ranks of ``group``, in place. All ranks call it together.

    Afterwards ``model(**inputs)`` and ``model.generate(**inputs)`` take the same inputs on every rank, those of the whole
    sequence, and return what the model returned before, up to rounding. Each rank computes consecutive tokens, in the order of
    the ranks. All ranks compute passes of fewer tokens than ranks, such as the steps of ``generate``; cached keys stay where they
    are.

    ``generate()`` does greedy search and sampling. Rank 0 chooses each token, with its own random generator, and decides when to
    stop; the others follow it. So a seed on rank 0 gives the text of one process with this seed.

    ``backward()`` is a call of all ranks, too. The gradients are those of the sum of the ranks' losses, and on a rank those of its tokens:
    sum them with :func:`kyklos.torch.sum_gradients`. With ``gather="auto"`` each rank has the whole loss: divide it by the number of ranks.

    A deep copy of the model is split over the group, too, with weights of its own. In training the ranks compare what their weights change by.

    :param model: a decoder or encoder whose layers attend through ``AttentionInterface`` of transformers, with ``position_ids``, or an
        encoder-decoder; without dropout (or in evaluation mode), with the same weights on all ranks.
    :param mesh: ``"UxR"`` as in :meth:`kyklos.Group.attend`, for passes that are split.
    :param strategy: how keys, values or queries travel in them; by default what sends the fewest bytes.
    :param wire: ``"f16"`` or ``"int8"`` round keys and values on their way, and what the model computes is no longer exact. Gradients take
        ``"f16"`` only.
    :param shares: the tokens of the ranks in proportion, also of the cache; by default equal. Each rank gets one token at least.
        ``"auto"``: so many that all ranks end at the same time, by the speed of the model's layers and of attention on each rank, which are
        measured here, in a second or so; :meth:`Handle.counts` has them. Without ``mesh`` and ``strategy`` the links are measured, too, and passes
        of each length run by the strategy of the least predicted time: :meth:`Handle.way`.
    :param gather: ``"auto"`` gives every rank the outputs of all tokens, or the last ones if ``logits_to_keep`` asks for them.
        ``"none"`` gives a rank the rows of its own tokens, :meth:`Handle.rows`, and with ``labels`` its part of the loss of a causal
        language model, whose sum over the ranks is the loss; ``generate()`` works as before.
    :param check: compare the split model with the model as it is, on two texts of a few tokens. Without it, a model that makes
        positions of its own or mixes tokens outside of attention gives wrong numbers.
    :raises RequestError: a model that cannot be split, by name, or options that do not fit; the same on all ranks. The model is
        then as it was.
    :raises GroupError: the group has ended.
    """
    with told(group):
        refuse_sharded(model)
        warn_of_copies(group, model)
        how = execution(group, mesh, strategy, wire, shares)
        stacks = stacks_of(model)
        split: SplitModel | SplitStacks
        if stacks:
            split = SplitStacks(model, stacks, group, how, shares, gather)
        else:
            split = SplitModel(model, group, how, shares, gather, mesh is None and strategy is None)
        split.install(check)
        handle = Handle(split)
        loss.install(split, handle._undo)
        generation.install(split, handle._undo)
        return handle


class Handle:
    """A split model. :meth:`remove` restores it; so does the end of a ``with`` block."""

    def __init__(self, split: SplitModel | SplitStacks) -> None:
        self._split: SplitModel | SplitStacks | None = split
        self._undo: list[Any] = []

    def cache(self, *, rollback: int = 0) -> SplitCache:
        """An empty cache over the ranks, as ``past_key_values`` of calls that follow each other. All ranks use it alike. Encoder-decoders take
        caches of transformers instead.

        :param rollback: tokens that :meth:`SplitCache.crop` can take back from layers with a sliding window, which drop older keys.
        """
        return self._installed().cache(rollback)

    def counts(self, tokens: int) -> list[int]:
        """The tokens that each rank computes in a pass over ``tokens`` tokens, by rank: consecutive ones, or all of them where they are few."""
        split = self._installed()
        if tokens < 1:
            raise ValueError(f"{tokens} tokens")
        return split.counts(tokens) or [tokens] * split.group.size

    def way(self, tokens: int, *, batch: int = 1, gradients: bool = False) -> str:
        """How attention runs in a pass over ``tokens`` tokens: the strategy and the mesh, with ``shares="auto"`` those of the least predicted time."""
        split = self._installed()
        if not isinstance(split, SplitModel) or (counts := split.counts(tokens)) is None:
            return "whole on each rank" if isinstance(split, SplitModel) else "as the options say"
        how = split.execution_of(batch, counts, gradients)
        return f"{how['strategy'] or 'fewest bytes'} on {how['mesh'] or 'any mesh'}"

    def rows(self, tokens: int) -> tuple[int, int]:
        """The tokens that this rank computes in a pass over ``tokens`` tokens, as a half-open range of positions."""
        return self._installed().rows(tokens)

    def prepare_trainer(self, trainer: Any) -> None:
        """Makes a ``Trainer`` of transformers, made with the split model, train over the ranks, before ``trainer.train()``. All ranks call it.

        Each rank has a ``Trainer`` with the same arguments, seed and data, which believes to be alone. Its gradients are summed before they are
        clipped; losses and metrics are those of the whole texts; rank 0 saves and reports. Callbacks run on each rank and must decide alike.
        :meth:`remove` makes it a usual ``Trainer`` again.

        :raises RequestError: a ``Trainer`` of several processes or GPUs, or of another model.
        """
        trainers.prepare(self._installed(), trainer, self._undo)

    def remove(self) -> None:
        """Restores the model. It may be called twice. Caches of the model can no longer be used."""
        if self._split is not None:
            while self._undo:
                self._undo.pop()()
            self._split.remove()
            self._split = None

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def _installed(self) -> SplitModel | SplitStacks:
        if self._split is None:
            raise ValueError("the model is no longer split: call parallelize() again")
        return self._split
