"""Tokens by the speed of ranks, even, and by weights: all ranks get the same answer, and the calls are exact."""

import numpy as np
import pytest
from oracle import attention, causal
from test_attend import check

import kyklos

TOKENS = 96
SHAPE = {"heads": 4, "kv_heads": 2, "dim": 32, "batch": 2}


def shared(arrays, size, device="cpu", calls=1, **options):
    """The shares of the last call, and the rows of all tokens in their order."""
    q, k, v = arrays

    def work(group):
        for _ in range(calls):
            shares = group.share(TOKENS, mask="causal", **SHAPE, **options)
            rows, keys = shares.queries(group.rank), shares.keys(group.rank)
            got = group.attend(q[:, rows], k[:, keys], v[:, keys], mask="causal", **shares.options)
        return shares, rows, got

    results = kyklos.run_local(size, work, device=device)
    shares = results[0][0]
    assert all(other == shares for other, _, _ in results), "the ranks disagree"
    for lists in (shares.q_tokens, shares.kv_tokens):
        positions = sorted(position for ranges in lists for first, end in ranges for position in range(first, end))
        assert positions == list(range(TOKENS)), "each token has one owner"
    order = np.argsort(np.concatenate([rows for _, rows, _ in results]))
    return shares, [np.concatenate([got[part] for _, _, got in results], axis=1)[:, order] for part in (0, 1)]


def counts(shares):
    return [len(shares.queries(rank)) for rank in range(len(shares.q_tokens))]


@pytest.mark.parametrize(
    ("shares", "want"),
    [("even", [32, 32, 32]), ([2, 1, 1], [48, 24, 24]), ((1, 0, 2), [32, 0, 64]), (np.array([1.0, 1.0, 4.0]), [16, 16, 64])],
)
@pytest.mark.parametrize("placement", [None, "zigzag"])
def test_even_shares_and_weights(tensors, shares, want, placement):
    arrays = tensors(TOKENS)
    got, rows = shared(arrays, 3, shares=shares, placement=placement)
    assert counts(got) == want
    check(rows, attention(*arrays, visible=causal(TOKENS, TOKENS)))


@pytest.mark.parametrize("size", [1, 3])
def test_shares_by_speed(tensors, size):
    arrays = tensors(TOKENS)
    # The second and third answers are from the calls before them.
    _, rows = shared(arrays, size, calls=3)
    check(rows, attention(*arrays, visible=causal(TOKENS, TOKENS)))


def test_shares_of_unlike_devices(tensors):
    try:
        kyklos.Group.local(1, device="wgpu")[0].close()
    except (kyklos.DeviceError, kyklos.RequestError) as fault:
        pytest.skip(f"no GPU: {fault}")
    arrays = tensors(TOKENS)
    _, rows = shared(arrays, 2, device=["cpu", "wgpu"], calls=2)
    check(rows, attention(*arrays, visible=causal(TOKENS, TOKENS)))


def test_speeds_of_all_ranks():
    def work(group):
        speeds = group.speeds(4096, heads=4, kv_heads=2, dim=32)
        assert group.speeds(128, heads=4, kv_heads=2, dim=32) == speeds, "one measurement for calls of a kind"
        with pytest.raises(kyklos.RequestError):
            group.speeds(4096, heads=3, kv_heads=2, dim=32)
        return speeds

    first, second = kyklos.run_local(2, work, device="cpu")
    assert first == second and len(first) == 2 and min(first) > 0


def test_speed_does_not_count_where_every_rank_has_the_same_work(tensors):
    arrays = tensors(TOKENS)
    for options in ({"fixed_order": True, "mesh": "1x2"}, {"mesh": "2x1"}):
        got = kyklos.run_local(2, lambda group, options=options: group.share(TOKENS, **SHAPE, **options), device="cpu")
        assert [counts(shares) for shares in got] == [[48, 48]] * 2, options
    check(shared(arrays, 2, mesh="2x1")[1], attention(*arrays, visible=causal(TOKENS, TOKENS)))


def test_other_numbers_of_queries_and_keys():
    def work(group):
        return group.share(40, 100, q_offset=60, mask="causal", shares=[3, 1], **SHAPE)

    for shares in kyklos.run_local(2, work, device="cpu"):
        assert counts(shares) == [30, 10]
        assert [len(shares.keys(rank)) for rank in (0, 1)] == [75, 25]


@pytest.mark.parametrize(
    "wrong",
    [
        {"shares": "fast"},
        {"shares": [1, 2, 3]},
        {"shares": [1, -1]},
        {"shares": [1, float("nan")]},
        {"shares": [0, 0]},
        {"shares": 5},
        {"shares": ["1", "2"]},
        {"mesh": "1x3"},
        {"mask": "sideways"},
        {"placement": "anywhere"},
        {"strategy": "relay", "mesh": "1x1"},
        {"dtype": "int32"},
    ],
)
@pytest.mark.parametrize("wrong_rank", [None, 1])
def test_wrong_arguments_are_an_error_of_all_ranks(wrong, wrong_rank):
    def work(group):
        options = wrong if wrong_rank in (None, group.rank) else {}
        with pytest.raises(kyklos.RequestError) as error:
            group.share(TOKENS, **SHAPE, **options)
        # The group stays usable.
        return str(error.value), counts(group.share(TOKENS, shares="even", **SHAPE))

    for text, of_even in kyklos.run_local(2, work, device="cpu"):
        assert text and of_even == [48, 48]


def test_ranks_that_share_other_problems_are_told():
    def work(group):
        with pytest.raises(kyklos.RequestError, match="shares the tokens of another problem"):
            group.share(TOKENS + group.rank, **SHAPE)
        return counts(group.share(TOKENS, **SHAPE))

    assert kyklos.run_local(2, work, device="cpu")[0] is not None
