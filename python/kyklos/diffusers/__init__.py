"""Splits the tokens of a diffusion transformer of diffusers over the ranks of a group.

::

    import kyklos, kyklos.diffusers

    with kyklos.Group.from_env() as group:
        handle = kyklos.diffusers.parallelize(pipe.transformer, group)
        image = pipe(prompt, generator=torch.Generator().manual_seed(0)).images[0]
        handle.remove()

Every rank runs the pipeline with the same inputs and a generator with the same seed, and has the whole result. Within the
transformer a rank has its share of the tokens; attention is exact over the tokens of all ranks.

``backward()`` is a call of all ranks, too. Every rank has the whole loss, and the gradients are those of the sum over the ranks: divide the loss
by their number, then sum the gradients of parameters with :func:`kyklos.torch.sum_gradients`.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch

from .._errors import RequestError
from .._group import Group
from .._models.execution import drops, execution, refuse_sharded, warn_of_copies
from .._models.telling import tell, told
from . import _attention, _hooks
from ._caught import catch
from ._encoders import EncoderHandle, encode_once
from ._plan import Count, Extent, Grid, Joined, Known, SplitPlan
from ._plans import calls, choose, find, split_attention_modules, sums_of
from ._timing import timed
from ._vae import VaeHandle, split_vae
from ._ways.choice import MOST_RANKS, Ways
from ._ways.kept import Kept
from ._ways.shares import Shares
from ._ways.whole import Whole, run

__all__ = [
    "Count",
    "EncoderHandle",
    "Extent",
    "Grid",
    "Handle",
    "Joined",
    "SplitPlan",
    "VaeHandle",
    "encode_once",
    "parallelize",
    "split_vae",
    "timed",
]

_TESTED = (0, 42)


class Handle:
    """A split transformer. :meth:`remove` makes it whole again; as a context manager it does so at the end of the block."""

    def __init__(self, transformer: torch.nn.Module, split: _attention.Split) -> None:
        self._split = split
        self._transformer = transformer
        self._hooks: list[Any] = []
        self._configs: list[tuple[Any, bool, Any]] = []
        self._checkpoints = _hooks.Checkpoints(transformer, split)
        #: In place of ``forward`` of the transformer, and what an instance had there before.
        self._forward: Any = None
        self._own_forward: Any = None
        self._whole: Whole | None = None
        self._removed = False

    def remove(self) -> None:
        """Takes all hooks away and gives attention back to the backends of diffusers. No rank waits for another, and the group
        may have ended. Compiled code is made again when it is next called."""
        if self._removed:
            return
        self._removed = True
        for hook in reversed(self._hooks):
            hook.remove()
        for processor, own, before in self._configs:
            if getattr(processor, "_parallel_config", None) is not self._split:
                continue
            if own:
                processor._parallel_config = before
            else:
                del processor._parallel_config
        self._checkpoints.restore()
        if self._forward is not None and vars(self._transformer).get("forward") is self._forward:
            del self._transformer.forward
            if self._own_forward is not None:
                self._transformer.forward = self._own_forward
        if self._whole is not None:
            self._whole.forget()
        _attention.unregister(self._split)

    def _replace_forward(self, ways: Ways) -> Whole:
        self._own_forward = vars(self._transformer).get("forward")
        whole = self._whole = Whole(self._split, ways, self._transformer, self._transformer.forward)
        forward: Any = functools.partial(run, whole)
        # Pipelines look at the names of its arguments.
        forward.__signature__ = inspect.signature(self._transformer.forward)
        self._forward = forward
        self._transformer.forward = forward
        return whole

    @property
    def way(self) -> str:
        """How the next forward runs, as far as it is known: the name of a way in :attr:`ways`, or ``"equal shares"``."""
        shares = self._split.shares
        chosen = shares.trial.now if isinstance(shares, Ways) and shares.trial is not None else None
        return "equal shares" if chosen is None else chosen.way.name

    @property
    def ways(self) -> str:
        """A table of the ways to compute a forward like the last one, with predicted and measured times; empty while none are known, and where
        an option says the way."""
        shares = self._split.shares
        return str(shares.trial) if isinstance(shares, Ways) and shares.trial is not None else ""

    @property
    def shares(self) -> list[int]:
        """The shares of the ranks in the next forward, relative to each other."""
        return list(self._split.shares.now)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "removed" if self._removed else f"{self._split.calls.always} calls of split attention in a forward"
        return f"kyklos.diffusers.Handle({self._split.name}, {state})"


def parallelize(
    transformer: torch.nn.Module,
    group: Group,
    *,
    mesh: str | None = None,
    strategy: str | None = None,
    wire: str | None = None,
    shares: str | Sequence[float] | None = None,
    plan: SplitPlan | Mapping[str, Any] | None = None,
    keep: str | os.PathLike[str] | None = None,
) -> Handle:
    """Splits the tokens of ``transformer`` over the ranks of ``group``. All ranks call it alike, then call the transformer, or its
    pipeline, with the same inputs.

    Weights stay whole on each rank. Adapters, offloading and ``compile_repeated_blocks`` may be set up before or after; adapters
    on modules that the plan names (``proj_out``) and those that set attention processors before.

    :param transformer: the denoiser of a pipeline, such as ``pipe.transformer``.
    :param mesh: ``"UxR"``: Ulysses groups of U ranks in a ring of R; by default what sends the fewest bytes.
    :param strategy: how keys, values or queries travel; by default what sends the fewest bytes.
    :param wire: ``"f16"`` or ``"int8"`` round keys and values on their way, and what the transformer computes is no longer exact. Gradients
        take ``"f16"`` only.
    :param shares: for each rank its share of the tokens, relative to the others; by default equal ones. Each rank gets at least
        one token of each split input. ``"auto"``: so many that all ranks end at the same time. The first three forwards, with equal shares,
        measure the speed of the layers and of attention on each rank; :attr:`Handle.shares` then has them. Other shapes of the inputs keep
        the shares for one forward, and compiled code is made again when they change.
    :param plan: for transformers that are not known: a :class:`SplitPlan`, or a dict like ``_cp_plan`` of diffusers, whose
        attention modules then all have split keys. Compare the result with the unsplit transformer.
    :param keep: a file of rank 0 for the ways that are chosen, where no option says the way. The next run with the same devices and shapes begins
        with them; delete the file after a change of the network.
    :returns: a handle, whose ``remove()`` undoes it.
    :raises RequestError: a transformer that is not known, attention that is out of reach, or shares that do not fit. Calls of the
        transformer raise it for inputs that differ between ranks, tokens that are too few, masks that cannot be split, and attention
        calls that are missing or too many.
    """
    with told(group):
        refuse_sharded(transformer)
        warn_of_copies(group, transformer)
        how = execution(group, mesh, strategy, wire, shares)
        chooses = mesh is None and strategy is None and shares is None
        if keep is not None and not chooses:
            raise RequestError("keep beside mesh, strategy or shares, which say the way: leave one of them out")
        return _parallelized(transformer, group, how, shares, plan, chooses, keep)


def _parallelized(
    transformer: torch.nn.Module,
    group: Group,
    how: dict[str, Any],
    shares: str | Sequence[float] | None,
    plan: SplitPlan | Mapping[str, Any] | None,
    chooses: bool,
    keep: str | os.PathLike[str] | None,
) -> Handle:
    name = type(transformer).__name__
    if tuple(int(part) for part in diffusers.__version__.split(".")[:2]) != _TESTED:
        raise RequestError(f"diffusers {diffusers.__version__} is not verified, 0.42 is: install diffusers>=0.42,<0.43")
    known = choose(transformer, plan)
    _check_free(transformer, name)
    modules = split_attention_modules(transformer, known.plan)
    if shares == "auto" and known.plan.sums:
        raise RequestError(f'shares="auto" for {name}, whose linear attention does not show the pace of the ranks: give a number for each rank')
    least = known.plan.least
    # Attention of compiled code makes masks and keys of the tokens of the rank.
    can_be_whole = not (known.plan.common_keys or known.plan.common_behind or known.plan.rows_alike)
    chooses = chooses and not known.plan.sums and 1 < group.size <= MOST_RANKS
    dealt = Ways(group, how, can_be_whole, least) if chooses else Shares(group, shares, how, least)
    split = _attention.Split(group, name, dealt, calls(name, modules, known.plan), known.plan)
    handle = Handle(transformer, split)
    splitter = _hooks.Splitter(group, dealt, known.plan.whole)
    # Apart, since modules that libraries keep in caches keep what their hooks have.
    of_grids = _hooks.Splitter(group, dealt, known.plan.whole, split.gather)
    try:
        split.passes.check_weights(transformer)
        if keep is not None and isinstance(dealt, Ways):
            dealt.keep(Kept(keep, name, split.passes))
        # Inputs are compared before they are split, and calls are counted after the last gather.
        arguments = list(inspect.signature(type(transformer).forward).parameters)[1:]
        whole = handle._replace_forward(dealt) if isinstance(dealt, Ways) else None
        begin = functools.partial(_begin, split, handle._checkpoints, whole, known, arguments)
        handle._hooks.append(transformer.register_forward_pre_hook(begin, with_kwargs=True))
        for pattern, how in known.plan.modules.items():
            for module in find(transformer, pattern):
                on_grid = isinstance(how, Mapping) and any(isinstance(part, Grid) for part in how.values())
                _add(handle, module, how, of_grids if on_grid else splitter)
        end = functools.partial(_end, split, handle._checkpoints, whole)
        handle._hooks.append(transformer.register_forward_hook(end, always_call=True))
        for place, module in modules.items():
            processor: Any = module.processor
            sums = sums_of(place, known.plan)
            if sums or not hasattr(processor, "_parallel_config"):
                handle._hooks += catch(module, split, sums)
                continue
            own = "_parallel_config" in vars(processor)
            handle._configs.append((processor, own, processor._parallel_config))
            processor._parallel_config = split
        _attention.register(split)
    except BaseException:
        handle.remove()
        raise
    return handle


def _add(handle: Handle, module: torch.nn.Module, how: Any, splitter: _hooks.Splitter) -> None:
    if not isinstance(how, Mapping):
        hook = _hooks.gather_outputs(module, how, handle._split)
        handle._hooks.append(module.register_forward_hook(hook))
        return
    before, after = _hooks.split_inputs(module, how, splitter), _hooks.split_outputs(module, how, splitter)
    if before is not None:
        handle._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if after is not None:
        handle._hooks.append(module.register_forward_hook(after))


@torch.compiler.disable
def _begin(
    split: _attention.Split,
    checkpoints: _hooks.Checkpoints,
    whole: Whole | None,
    known: Known,
    arguments: list[str],
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    with told(split.group):
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        for argument, why in known.refused.items():
            if given.get(argument) is not None and given[argument] is not False:
                raise RequestError(
                    f"{split.name} is called with {argument}, which split transformers do not take, since {why}: leave it out"
                )
        for argument in known.padded_behind:
            mask = given.get(argument)
            if isinstance(mask, torch.Tensor) and (mask.bool()[:, 1:] & ~mask.bool()[:, :-1]).any():
                raise RequestError(
                    f"{split.name} is called with {argument} with padding before tokens: let the tokenizer pad behind them, as its pipeline does"
                )
        if getattr(module, "is_cache_enabled", False):
            raise RequestError(
                f"{split.name} has a cache that skips attention by what it sees of this rank's tokens: call disable_cache()"
            )
        if module.training and drops(module):
            raise RequestError(f"{split.name} has dropout, which would differ between ranks: call eval(), or set its p to 0")
        checkpoints.remember()
        split.begin(module, given)
        if whole is not None:
            whole.begin(split.inputs)


@torch.compiler.disable
def _end(
    split: _attention.Split, checkpoints: _hooks.Checkpoints, whole: Whole | None, module: torch.nn.Module, args: Any, output: Any
) -> None:
    checkpoints.restore()
    error = sys.exc_info()[1]
    if output is None and isinstance(error, Exception):
        # A fault of this rank: the others learn of it in the call that they are in.
        tell(split.group, error)
        return
    with told(split.group):
        if whole is not None:
            whole.end(output)
        split.end()


def _check_free(transformer: torch.nn.Module, name: str) -> None:
    if getattr(transformer, "_parallel_config", None) is not None:
        raise RequestError(f"{name} is split by diffusers already: do not call enable_parallelism beside kyklos")
    if _hooks.is_split(transformer):
        raise RequestError(f"{name} is split by kyklos already: call remove() of its handle first")
