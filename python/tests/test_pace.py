"""The tokens of ranks by their pace: against all divisions, and with a window against its pairs one by one."""

import itertools
import warnings

import pytest

from kyklos._models import pace
from kyklos._models.pace import Pace

REACHES = [(None, None), (None, 0), (3, 0), (2, 2), (0, 0), (0, None)]


def pairs(tokens, reach, first, end):
    left, right = (tokens if extent is None else extent for extent in reach)
    return sum(query - left <= key <= query + right for query in range(first, end) for key in range(tokens))


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_visible_pairs(reach):
    for tokens, rows in itertools.product([1, 5, 13], range(14)):
        if rows <= tokens:
            assert pace.visible(tokens, reach, rows) == pairs(tokens, reach, 0, rows), (tokens, rows)


@pytest.mark.parametrize("attention", [[], [(4, (None, 0))], [(4, (None, None)), (8, (3, 0))]], ids=str)
@pytest.mark.parametrize("speeds", [([1000, 1000], [10**9, 10**8]), ([700, 1000, 90], [10**6, 3 * 10**6, 10**7])], ids=str)
@pytest.mark.parametrize("whole", [(), (300, 100, 0)], ids=str)
def test_no_division_ends_earlier(speeds, attention, whole):
    of = Pace(*map(tuple, speeds), (0, 5000, 0)[: len(speeds[0])], whole)
    size, tokens = len(speeds[0]), 21

    def end(counts):
        ends = [0, *itertools.accumulate(counts)]
        work = [sum(heads * pairs(tokens, reach, *ends[rank : rank + 2]) for heads, reach in attention) for rank in range(size)]
        fixed = [of.fixed_ns[rank] + tokens * (whole or (0,) * 3)[rank] for rank in range(size)]
        times = [fixed[rank] + of.token_ns[rank] * counts[rank] + 10**9 * work[rank] / of.pairs_per_s[rank] for rank in range(size)]
        assert of.seconds(counts, attention) == pytest.approx([time / 10**9 for time in times])
        return max(times)

    divisions = [parts for parts in itertools.product(range(1, tokens), repeat=size) if sum(parts) == tokens]
    counts = of.counts(tokens, attention)
    assert sum(counts) == tokens and min(counts) >= 1
    # The end is found in whole nanoseconds.
    assert end(counts) <= min(map(end, divisions)) + 1


def test_every_rank_has_a_token_whatever_its_pace():
    slow = Pace((1, 10**14, 1), (10**12, 1, 10**12), (0,) * 3)
    assert slow.counts(3, [(8, (None, 0))]) == [1, 1, 1]
    assert slow.counts(1000, [(8, (None, 0))])[1] == 1
    with pytest.raises(ValueError, match="2 tokens for 3 ranks"):
        slow.counts(2, [])
    assert sum(slow.counts(2**24, [(64, (None, 0)), (64, (1023, 0))])) == 2**24


def test_differences_that_are_noise_do_not_count():
    assert Pace.of([1000, 1090], [91, 100]) == Pace((1090, 1090), (100, 100), (0,) * 2)
    assert Pace.of([1000, 1200], [80, 0]) == Pace((1000, 1200), (80, 1), (0,) * 2)


def test_time_of_a_token(monkeypatch):
    clock = 0.0

    def run(tokens):
        nonlocal clock
        # A fixed cost, which long runs hide; the first run of each length takes longer.
        clock += 0.004 + tokens * 1e-4 + (0.5 if tokens not in seen else 0)
        seen.append(tokens)

    seen = []
    monkeypatch.setattr(pace.time, "perf_counter", lambda: clock)
    assert pace.token_ns(run, 10**6) == (pytest.approx(1e5, rel=0.1), 1024)
    assert seen == [64, 64, 256, 256, 1024, 1024]
    seen.clear()
    assert pace.token_ns(run, 100) == (pytest.approx(1.4e5, rel=0.01), 100) and seen == [64, 64, 100, 100]


def test_a_pass_that_one_rank_alone_would_do_faster_is_told_once():
    of, attention, watch = Pace((1000, 3000), (10**9, 10**9), (0,) * 2), [(4, (None, 0))], pace.Watch(900)
    alone = of.alone(0, 1000, attention)
    assert alone == pytest.approx(1000 * 1e-6 + 4 * 1000 * 1001 / 2 / 1e9) and of.alone(1, 1000, attention) > alone
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # As fast; too few; other lengths; one of them fast enough.
        for wall in (2 * alone, 2 * alone, 1.05 * alone, 9 * alone):
            watch.saw(of, 1000, attention, wall)
        watch.saw(of, 2000, attention, 9.0)
        watch.saw(of, 2000, attention, 9.0)
        for _ in range(4):
            # Fewer than pace was measured with; one rank.
            watch.saw(of, 899, attention, 9.0)
            watch.saw(Pace((1000,), (10**9,), (0,) * 1), 2000, attention, 9.0)
    with pytest.warns(UserWarning, match="a pass over 2000 tokens takes 9 s on 2 ranks, and would take about 0.01 s on rank 0 alone"):
        watch.saw(of, 2000, attention, 9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.saw(of, 2000, attention, 9.0)
        # Warnings that are errors end nothing.
        for _ in range(4):
            pace.Watch(1).saw(of, 2000, attention, 9.0)
