"""The ways to compute a forward on the ranks of a group, and the choice among them: by prediction, then by trial."""

from __future__ import annotations

import contextlib
import logging
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from ..._errors import RequestError
from ..._group import Group
from ..._models.agreement import Passes
from ..._models.pace import Pace
from ..._plan import Cluster
from .calls import Pairs, tensors_of
from .shares import MEASURED, USUAL_TOKENS, Shares
from .stopwatch import Calls

_log = logging.getLogger("kyklos")

# Forwards of a way that is tried; the fastest counts, since the first may compile. Of pairs of calls whole ones.
_TRIED, _TRIED_PAIRS = 2, 4
# At most so many ways are tried, each if it may be faster than the best one: if it takes this part of what it promises. While none of its kind
# was tried, the part is smaller: kernels of PyTorch or of the group, messages or none.
_MOST, _OF_KIND, _OF_OTHER_KIND = 4, 0.85, 0.65
_S = 10**9


@dataclass(frozen=True)
class Way:
    """A way to compute a forward."""

    name: str
    #: The tokens of the ranks, relative to each other; and options of :meth:`Group.attend`.
    shares: tuple[int, ...] = ()
    execution: Mapping[str, Any] = field(default_factory=dict)
    #: Instead: how many entries of the batch each rank computes whole.
    entries: tuple[int, ...] = ()
    #: Instead: the ranks that compute the two calls of a step, each one whole.
    pair: tuple[int, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no rank has a part of a forward only."""
        return bool(self.entries) or self.pair is not None

    @property
    def cuts_batch(self) -> bool:
        return sum(entries > 0 for entries in self.entries) > 1


@dataclass
class Estimate:
    """A way, and what is known of it."""

    way: Way
    #: Seconds of a forward, as predicted; bytes that a rank sends at most in its attention.
    predicted_s: float
    sent_bytes: int = 0
    #: Seconds for which ranks wait for another one.
    longest_s: float = 0.0
    #: Seconds of the forwards that were tried, on the slowest rank.
    tried_s: list[float] = field(default_factory=list)
    #: Whether results were wrong, or inputs did not come in pairs.
    failed: bool = False

    @property
    def measured_s(self) -> float | None:
        if self.way.pair is not None:
            # The first of two calls computes both.
            pairs = [sum(self.tried_s[at : at + 2]) / 2 for at in range(0, len(self.tried_s) - 1, 2)]
            return min(pairs, default=None)
        return min(self.tried_s, default=None)

    @property
    def is_tried(self) -> bool:
        return self.failed or len(self.tried_s) >= (_TRIED_PAIRS if self.way.pair is not None else _TRIED)


class Trial:
    """Ways for inputs of one shape, of two kinds: the tokens split, or forwards whole. The most promising one is tried first, then the next one as
    long as it promises less time than the best has taken. The fastest stays."""

    def __init__(self, estimates: Sequence[Estimate]) -> None:
        self.estimates = sorted(estimates, key=lambda estimate: estimate.predicted_s)

    @property
    def is_over(self) -> bool:
        return self._trying is None

    @property
    def now(self) -> Estimate | None:
        """What the next forward tries, or what has won. Nothing if all have failed."""
        return self._trying or self._best

    @property
    def _trying(self) -> Estimate | None:
        begun = [estimate for estimate in self.estimates if estimate.tried_s or estimate.failed]
        unfinished = next((estimate for estimate in begun if not estimate.is_tried), None)
        if unfinished is not None or len(begun) >= _MOST:
            return unfinished
        untried = [estimate for estimate in self.estimates if not estimate.is_tried]
        hopeful = min(untried, key=self._promised_s, default=None)
        best_s = None if self._best is None else self._best.measured_s
        return hopeful if hopeful is None or best_s is None or self._promised_s(hopeful) < best_s else None

    def _promised_s(self, estimate: Estimate) -> float:
        """What it may take: of the predicted time, and with the error of those of its kind that were tried."""
        errors = [
            other.measured_s / other.predicted_s
            for other in self.estimates
            if other.measured_s and other.predicted_s and other.is_tried and other.way.is_whole == estimate.way.is_whole
        ]
        return estimate.predicted_s * (statistics.median(errors) * _OF_KIND if errors else _OF_OTHER_KIND)

    @property
    def _best(self) -> Estimate | None:
        measured = [estimate for estimate in self.estimates if estimate.is_tried and not estimate.failed]
        return min(measured, key=lambda estimate: estimate.measured_s or 0.0, default=None)

    def __str__(self) -> str:
        width = max(len(estimate.way.name) for estimate in self.estimates)
        lines = [f"{'':{width}}  predicted (s)  measured (s)  sent by a rank (MB)"]
        for estimate in self.estimates:
            measured = "failed" if estimate.failed else "" if estimate.measured_s is None else f"{estimate.measured_s:.4g}"
            chosen = "  <- chosen" if self.is_over and estimate is self.now else ""
            row = f"{estimate.way.name:{width}}  {estimate.predicted_s:13.4g}  {measured:>12}  {estimate.sent_bytes / 1e6:19.3f}{chosen}"
            lines.append(row.rstrip())
        return "\n".join(lines)


# What a group has measured, by kind of calls.
_clusters: WeakKeyDictionary[Group, dict[Any, Cluster]] = WeakKeyDictionary()
# Ranks wait for a whole forward for so much of the deadline of a vote at most.
_PATIENCE = 0.25
#: Links are measured between each two ranks.
MOST_RANKS = 64


class Kept(Protocol):
    """Where ways are kept from one run to the next."""

    def estimates(self) -> dict[tuple[Any, ...], Estimate]: ...

    def add(self, latents: tuple[Any, ...], estimate: Estimate) -> None: ...


class Ways(Shares):
    """Chooses how forwards without gradients run. The first ones, with equal shares and what sends the fewest bytes, measure the ranks, and
    the next ones try what promises to be fastest.

    :param wholes: whether single ranks can compute forwards whole.
    """

    def __init__(self, group: Group, execution: dict[str, Any], wholes: bool, least: int = 1) -> None:
        super().__init__(group, None, execution, least)
        self._wholes = wholes
        self.default = Way("equal shares", self.now, execution)
        #: How the forward that runs is computed, and what the last one was.
        self.way = self.default
        self.trials: dict[tuple[Any, ...], Trial] = {}
        self.pairs = Pairs()
        #: Seconds of the forwards that were measured, by shapes.
        self._walls_s: dict[tuple[Any, ...], list[float]] = {}
        self._has_ended = False
        self._kept: Kept | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Ways:
        """A copy of the transformer chooses for itself: ranks may copy at other times."""
        return Ways(self.group, dict(self.default.execution), self._wholes, self.least)

    def keep(self, kept: Kept) -> None:
        """Begins with the ways that are kept, and keeps those that will be chosen."""
        self._kept = kept
        for shapes, estimate in kept.estimates().items():
            way = estimate.way
            if self._wholes if way.is_whole else way.execution.get("wire") == self.execution.get("wire"):
                self.trials[shapes] = Trial([estimate])

    @property
    def trial(self) -> Trial | None:
        """That of the last forward."""
        return self.trials.get(self._shapes)

    def begin(self, passes: Passes, number: int, inputs: dict[str, Any]) -> None:
        self.totals, self.whole = {}, False
        last = self._shapes
        if self._measures:
            # All of this is equal on all ranks, also after forwards that failed on one of them.
            self._note(passes, number, last)
        self._measures = not torch.is_grad_enabled()
        self._has_ended = False
        if not self._measures:
            self._run(self.default)
            return
        self._shapes = _latents(inputs)
        trial = self.trials.get(self._shapes)
        chosen = trial.now if trial is not None else None
        if trial is not None and trial.is_over and (chosen is None or chosen.way.pair is None):
            # Copies of inputs, which nobody needs.
            self.pairs = Pairs()
        else:
            self.pairs.begin(inputs)
        self._run(self.default if chosen is None else chosen.way)
        self._times.begin()

    def end(self) -> None:
        if self._measures and self.learns:
            self._times.end()
            self._has_ended = True
        self.whole = False

    @property
    def learns(self) -> bool:
        """Whether forwards of the shapes of the last one still show something, or are whole."""
        trial = self.trial
        return trial is None or not trial.is_over or (trial.now is not None and trial.now.way.is_whole)

    def split(self) -> None:
        """The forward that runs is split after all, by equal shares."""
        if self.whole:
            self._run(self.default)

    def leave_out(self) -> None:
        """The time of the forward that runs does not count."""
        self._has_ended = self._measures = False

    def fail(self, way: Way | None) -> None:
        """This way is not for inputs of these shapes."""
        for estimate in self.trial.estimates if self.trial is not None else ():
            estimate.failed |= estimate.way == way

    def _run(self, way: Way) -> None:
        self.way, self.whole = way, way.is_whole
        if not way.is_whole:
            self.now, self.execution = way.shares, dict(way.execution)

    def _note(self, passes: Passes, number: int, shapes: tuple[Any, ...]) -> None:
        """What the last forward has shown."""
        trial = self.trials.get(shapes)
        if trial is not None and trial.is_over:
            return
        ns = round(self._times.wall_s * _S) if self._has_ended else 0
        rows = passes.compare([int(self._has_ended), *divmod(ns, 1 << 24), int(self.pairs.found)], "times")
        wall_s = max((high << 24) + low for _, high, low, _ in rows) / _S
        if not all(ended for ended, *_ in rows):
            return
        if trial is None:
            self._walls_s.setdefault(shapes, []).append(wall_s)
            if number > MEASURED:
                try:
                    self._predict(passes, shapes, all(found for *_, found in rows))
                except RequestError as error:
                    # Of what all ranks have asked alike.
                    if not getattr(error, "told", False) and error.rank is not None:
                        raise
                    self.trials[shapes] = Trial([Estimate(self.default, 0.0, tried_s=[0.0] * _TRIED)])
            return
        trying = trial.now
        if trying is not None and trying.way == self.way:
            trying.tried_s.append(wall_s)
        if trial.is_over:
            self._tell(trial)
            if self._kept is not None and trial.now is not None:
                try:
                    self._kept.add(shapes, trial.now)
                except (OSError, RequestError) as error:
                    _warn(f"the way of forwards is not kept: {error}")

    def _predict(self, passes: Passes, shapes: tuple[Any, ...], has_pairs: bool) -> None:
        calls = self._times.calls
        tokens = self._measured(passes)
        if calls is None or tokens is None or self._pace is None:
            return
        known = _clusters.setdefault(self.group, {})
        kind = tuple(calls.kind.items())
        if kind not in known:
            known[kind] = self.group.cluster(USUAL_TOKENS, **calls.kind)
        cluster = known[kind]
        wall_s = min(self._walls_s.pop(shapes, [])[-2:], default=0.0)
        asked = {**calls.kind, "batch": calls.entries, "wire": self.execution.get("wire")}
        estimates = self._splits(cluster, asked, calls, sum(tokens), tokens, wall_s)
        if self._wholes:
            # While one rank computes whole forwards, the others wait for it.
            longest_s = _PATIENCE * self.group.deadline_s
            estimates += [whole for whole in wholes(self._pace, calls, sum(tokens), has_pairs) if whole.longest_s <= longest_s]
        self.trials[shapes] = Trial(estimates)

    def _splits(
        self, cluster: Cluster, asked: dict[str, Any], calls: Calls, tokens: int, equal: Sequence[int], wall_s: float
    ) -> list[Estimate]:
        """The ways that split the tokens."""
        assert self._pace is not None
        size, found = self.group.size, []
        by_work = self._pace.counts(tokens, [(calls.total_heads, (None, None))])
        for counts, has_ring in ((by_work, True), (self._pace.counts(tokens, []), False)):
            beside_s = beside(self._pace, calls.entries, counts)
            for choice in cluster.choices(counts, **asked):
                if choice.mesh.endswith("x1") == has_ring and size > 1:
                    continue
                how = {"mesh": choice.mesh, "strategy": choice.strategy, "wire": self.execution.get("wire")}
                way = Way(f"{choice.strategy} on {choice.mesh}, tokens {':'.join(map(str, counts))}", tuple(counts), how)
                found.append(Estimate(way, beside_s + calls.number * choice.seconds, calls.number * choice.sent_bytes))
        # A call takes longer than its attention and messages, by what the forwards with equal shares have shown.
        steps = self.group.plan(list(equal), batch=calls.entries, **calls.kind, **self.execution).steps
        here = cluster.choices(list(equal), **asked, mesh=steps["mesh"], strategy=steps["strategy"])[0]
        more_s = max(0.0, wall_s - beside(self._pace, calls.entries, equal) - calls.number * here.seconds)
        for estimate in found:
            estimate.predicted_s += more_s
        return found

    def _tell(self, trial: Trial) -> None:
        chosen = trial.now
        if self.group.rank or chosen is None:
            return
        splits = [estimate for estimate in trial.estimates if not estimate.way.is_whole]
        other = min(splits, key=lambda estimate: estimate.measured_s or estimate.predicted_s)
        seconds = chosen.measured_s or chosen.predicted_s
        if chosen.way.is_whole:
            than = f"the tokens split over {self.group.size} ranks would take about {other.measured_s or other.predicted_s:.3g} s"
        else:
            than = f"{len(trial.estimates)} ways were compared"
        _log.info("a forward runs by %s in %.3g s: %s", chosen.way.name, seconds, than)
        if sum(entries > 0 for entries in chosen.way.entries) == 1:
            _warn(
                f"{chosen.way.name} computes forwards in {seconds:.3g} s, {than}, and the other ranks wait: use longer inputs, a faster network, "
                "or one rank"
            )


def _warn(text: str) -> None:
    # Where warnings are errors, this one must not end a forward of one rank.
    with contextlib.suppress(UserWarning):
        warnings.warn(text, stacklevel=3)


def _latents(inputs: dict[str, Any]) -> tuple[Any, ...]:
    """The shapes for which a way is chosen: those of the latents, the first argument. Prompts are of several lengths."""
    return tuple(tuple(x.shape) for x in tensors_of(next(iter(inputs.values()), None)))


def beside(pace: Pace, entries: int, counts: Sequence[int]) -> float:
    """Seconds of the slowest rank outside of attention."""
    return entries * max(f + t * c for f, t, c in zip(pace.fixed_ns, pace.token_ns, counts, strict=True)) / _S


def wholes(pace: Pace, calls: Calls, tokens: int, has_pairs: bool) -> list[Estimate]:
    """The ways in which single ranks compute whole entries of the batch, or whole calls."""
    ranks = range(len(pace.token_ns))
    entry_s = [pace.alone(rank, tokens, [(calls.total_heads, (None, None))]) for rank in ranks]
    fastest = sorted(ranks, key=lambda rank: entry_s[rank])
    alone = tuple(calls.entries if rank == fastest[0] else 0 for rank in ranks)
    alone_s = calls.entries * entry_s[fastest[0]]
    found = [Estimate(Way(f"rank {fastest[0]} alone", entries=alone), alone_s, longest_s=alone_s)]
    if calls.entries > 1 and len(ranks) > 1:
        dealt = [0] * len(ranks)
        for _ in range(calls.entries):
            dealt[min(ranks, key=lambda rank: (dealt[rank] + 1) * entry_s[rank])] += 1
        slowest_s = max(count * seconds for count, seconds in zip(dealt, entry_s, strict=True))
        if tuple(dealt) != alone:
            way = Way(f"whole entries of the batch, {':'.join(map(str, dealt))}", entries=tuple(dealt))
            found.append(Estimate(way, slowest_s, longest_s=slowest_s))
    if has_pairs and len(ranks) > 1:
        first, second = fastest[:2]
        way = Way(f"the two calls of a step on ranks {first} and {second}", pair=(first, second))
        found.append(Estimate(way, calls.entries * entry_s[second] / 2, longest_s=calls.entries * entry_s[second]))
    return found
