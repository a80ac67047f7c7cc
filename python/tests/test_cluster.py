"""What a group measures of its devices and links, and what follows for a call."""

import pytest

import kyklos


def measured(size):
    return kyklos.run_local(size, lambda group: group.cluster(1024, heads=4, dim=32), device="cpu")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_get_the_same_cluster_with_a_link_for_each_pair(size):
    clusters = measured(size)
    assert len({str(cluster) for cluster in clusters}) == 1
    assert str(clusters[0]).count("[link.") == size * (size - 1) // 2
    choices = clusters[0].choices([40] * size, heads=4, dim=32)
    assert choices and all(choice.seconds > 0 for choice in choices)
    assert [choice.seconds for choice in choices] == sorted(choice.seconds for choice in choices)


def test_ranks_that_measure_other_calls_are_refused():
    def work(group):
        with pytest.raises(kyklos.RequestError, match="another problem"):
            group.cluster(1024, heads=4, dim=32 + 32 * group.rank)
        return group.cluster(1024, heads=4, dim=32)

    first, second = kyklos.run_local(2, work, device="cpu")
    assert str(first) == str(second)


def described(gb_per_s, dtype="f16", dim=64):
    """Two machines of 1 TFLOP/s with a link between them."""
    devices = "".join(
        f"""
[device.{name}]
copy_gb_per_s = 100
memory = "unified"
attention = [{{ dtype = "{dtype}", head_dim = {dim}, gflop_per_s = 1000 }}]
"""
        for name in "ab"
    )
    hosts = "".join(f'[[host]]\nname = "{name}"\ndevices = [{{ kind = "{name}" }}]\n' for name in "ab")
    link = f"[link.cable]\ngb_per_s = {gb_per_s}\nlatency_us = 100\n"
    return kyklos.Cluster(f'name = "two"\nbetween_hosts = "cable"\n{devices}{link}{hosts}')


def test_choices_follow_the_link():
    call = {"heads": 8, "dim": 64, "dtype": "float16"}
    # 4 · 64 · 8 · 8192² operations on two devices.
    least = 4 * 64 * 8 * 8192**2 / 2e12
    fast, slow = (described(speed).choices([4096, 4096], **call) for speed in (10, 0.01))
    assert least <= fast[0].seconds <= 1.1 * least
    # 8 MiB of keys and values, at 10 MB in a second.
    assert slow[0].seconds > 0.5
    int8 = described(0.01).choices([4096, 4096], **call, wire="int8", mesh="1x2")[0]
    assert int8.seconds < 0.7 * slow[0].seconds and int8.sent_bytes < 0.6 * slow[0].sent_bytes
    only = described(1).choices([4096, 4096], **call, strategy="pass-q")
    assert [choice.strategy for choice in only] == ["pass-q"]
    both = described(1).choices([4096, 4096], **call, gradients=True)
    assert both[0].seconds > 2 * fast[0].seconds


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float32"}, "no attention rate for f32"),
        ({"mesh": "2x2"}, "2x2"),
        ({"strategy": "fast"}, "`fast` is not known"),
        ({"mask": "none"}, "none"),
    ],
    ids=str,
)
def test_calls_that_do_not_fit_are_refused(options, says):
    call = {"heads": 8, "dim": 64, "dtype": "float16"} | options
    with pytest.raises(kyklos.RequestError, match=says):
        described(1).choices([10, 10], **call)


def test_a_description_that_is_none_is_refused():
    with pytest.raises(kyklos.RequestError, match="cluster description"):
        kyklos.Cluster("speed = 3").choices([10], heads=1, dim=8)
