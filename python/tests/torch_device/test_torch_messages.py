"""Messages between devices of PyTorch by ``torch.distributed``: processes over gloo on the CPU."""

import subprocess
import sys
import textwrap

import pytest

PREFIX = """
import os, signal, sys, time
import torch, torch.distributed as dist
import kyklos
from kyklos._device import _messages
from kyklos._device._device import Device
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
through_host, by_torch = [], []
upload, on_host = Device.upload, Device.on_host
Device.upload = lambda self, data, count: through_host.append(count) or upload(self, data, count)
Device.on_host = lambda self, buffer, start, end: through_host.append(end - start) or on_host(self, buffer, start, end)
init = _messages.Exchange.__init__
_messages.Exchange.__init__ = lambda self, *a: by_torch.append(sum(end - first for *_, first, end in a[1])) or init(self, *a)

def form(collective="torch", process_group=None, device="torch:cpu", **options):
    return kyklos.Group.from_torch(process_group, device=device, collective=collective, **options)

def states(counts, dtype=torch.float32, heads=6, kv_heads=3):
    generator = torch.Generator().manual_seed(7)
    make = lambda of: torch.randn(2, sum(counts), of, 24, generator=generator).to(dtype)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return [make(of)[:, own] for of in (heads, kv_heads, kv_heads, heads)]

def both_ways(group, counts, dtype=torch.float32, heads=6, kv_heads=3, **options):
    q, k, v, d_o = states(counts, dtype, heads, kv_heads)
    o, lse = group.attend(q, k, v, lse_pair=True, layout="bshd", **options)
    sent = [group.report["bytes_sent"]]
    gradients = group.backward(q, k, v, o, lse, d_o, layout="bshd", **options)
    sent.append(group.report["bytes_sent"])
    return [o, lse, gradients.dq, gradients.dk, gradients.dv], sent

def same(found, wanted):
    return all(torch.equal(*(z.contiguous().view(torch.uint8) for z in (x, y))) for x, y in zip(found, wanted, strict=True))

def refused(call, *words):
    try:
        call()
    except kyklos.RequestError as error:
        assert all(word in str(error) for word in words), error
        return error
    raise AssertionError("not refused")
"""


def start(size, folder, body):
    script = PREFIX + textwrap.dedent(body)
    argv = [sys.executable, "-c", script]
    return [
        subprocess.Popen([*argv, str(rank), str(size), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]


def ends(processes):
    found = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "\nkilled: it did not end"
        found.append((process.returncode, out, err))
    return found


def run(size, folder, body):
    """All ranks run ``body``, and say that they have come to its end."""
    found = ends(start(size, folder, textwrap.dedent(body) + "\nprint('end', flush=True)\ndist.destroy_process_group()\n"))
    assert all(code == 0 and out == "end\n" for code, out, _ in found), "\n".join(f"{code} {out} {err}" for code, out, err in found)


CALLS = """
calls = [
    ([20, 31, 17], torch.float32, {"strategy": "ring", "mesh": "1x3", "mask": "causal"}),
    ([20, 31, 17], torch.bfloat16, {"strategy": "bidirectional", "mesh": "1x3", "mask": "full"}),
    ([9, 9, 9], torch.float32, {"strategy": "ulysses", "mesh": "3x1", "mask": "causal"}),
    ([20, 31, 17], torch.float16, {"strategy": "ulysses", "mesh": "3x1", "mask": "window:9,0"}),
    ([3, 61, 0], torch.float32, {"strategy": "pass-q", "mesh": "1x3", "mask": "causal"}),
    ([40, 0, 1], torch.float32, {"mask": "causal"}),
    ([33, 33, 33], torch.float32, {"strategy": "gather", "mesh": "1x3", "mask": "documents:0,20,61,99"}),
    ([20, 31, 17], torch.float32, {"strategy": "ring", "mesh": "1x3", "mask": "causal", "wire": "f16"}),
]
"""


def test_results_and_gradients_have_the_bytes_of_messages_through_the_host(tmp_path):
    """And those messages went where they say: no tensor through the host, and as many bytes as the report says by PyTorch."""
    run(
        3,
        tmp_path,
        CALLS
        + """
with form("host") as host, form() as group:
    assert (host.collective, group.collective) == ("host memory", "torch.distributed (gloo)")
    for counts, dtype, options in calls:
        wanted, sent_by_host = both_ways(host, counts, dtype, **options)
        assert sum(sent_by_host) == 0 or max(through_host) > 100
        through_host.clear()
        by_torch.clear()
        for again in range(2):
            found, sent = both_ways(group, counts, dtype, **options)
            assert same(found, wanted), options
            assert sent == sent_by_host
        # A word for all elements that float16 does not have.
        assert max(through_host, default=0) <= 16 and sum(by_torch) == 2 * sum(sent), (options, through_host, by_torch, sent)
    # The caller's own messages between calls.
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 6 and same(both_ways(group, counts, dtype, **options)[0], wanted)
""",
    )


def test_messages_that_are_mixed_up_are_seen(tmp_path):
    """A control of the test above: two pieces of equal size change places."""
    run(
        2,
        tmp_path,
        """
        post = _messages.Messages.post
        def mixed(self, sends, recvs, done):
            if len(sends) == 2 and rank == 1:
                (to, first, *one), (_, second, *other) = sends
                sends = [(to, first, *other), (to, second, *one)]
            return post(self, sends, recvs, done)
        counts, options = [16, 16], {"strategy": "ring", "mesh": "1x2", "mask": "full"}
        with form("host") as host, form() as group:
            wanted, _ = both_ways(host, counts, **options)
            assert same(both_ways(group, counts, **options)[0], wanted)
            _messages.Messages.post = mixed
            found, _ = both_ways(group, counts, **options)
            # Rank 0 has got values for keys.
            assert same(found[:1], wanted[:1]) == (rank == 1)
        """,
    )


def test_a_group_of_some_processes_and_one_after_another(tmp_path):
    run(
        4,
        tmp_path,
        """
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        own = pairs[rank % 2]
        for round_ in range(3):
            with form(process_group=own) as group:
                assert group.size == 2 and group.rank == rank // 2
                counts = [5 + round_, 0, 6, 0] if rank % 2 == 0 else [0, 5, 0, 7 + round_]
                q, k, v, _ = states(counts)
                o, _ = group.attend(q, k, v, mask="causal", layout="bshd")
                with kyklos.Group.local(1, device="torch:cpu")[0] as alone:
                    parts = [None] * 2
                    dist.all_gather_object(parts, (q, k, v), group=own)
                    whole = [torch.cat(part, 1) for part in zip(*parts)]
                    wanted, _ = alone.attend(*whole, mask="causal", layout="bshd")
                first = 0 if group.rank == 0 else parts[0][0].shape[1]
                assert (o - wanted[:, first : first + q.shape[1]]).abs().max() <= 3e-6
        """,
    )


def test_all_kinds_of_calls(tmp_path):
    """Meshes of two axes, decoding over a cache, the operator with its gradients, and links that are measured."""
    run(
        4,
        tmp_path,
        """
        import kyklos.torch
        def calls(group):
            results = [*both_ways(group, [7, 12, 0, 9], strategy="unified", mesh="2x2", mask="causal", kv_heads=6, heads=12)[0]]
            q, k, v, d_o = states([7, 12, 3, 9])
            cache = group.kv_cache(3, 24, batch=2)
            results += group.attend_cached(cache, q, k, v, mask="causal", layout="bshd")
            whole = [torch.ones_like(x[:, :1]) for x in (q, k, v)]
            for _ in range(3):
                results += group.attend_cached(cache, *whole, mask="causal", same_queries=True, layout="bshd")
            with group.cached_calls([cache], *whole, mask="causal", same_queries=True, layout="bshd") as layers:
                results += [x for x in layers.attend(*whole)]
            leaves = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
            o, lse = kyklos.torch.attention(*leaves, group, mask="causal")
            return [*results, o, lse, *torch.autograd.grad(o, leaves, d_o.transpose(1, 2))]
        with form("host") as host, form() as group:
            assert same(calls(group), calls(host))
            group.cluster(64, heads=2, dim=16)
            assert same(calls(group), calls(host))
        """,
    )


def test_a_process_group_whose_ranks_are_in_another_order(tmp_path):
    run(
        3,
        tmp_path,
        """
        other = dist.new_group([2, 0, 1], sort_ranks=False)
        counts, options = [4, 5, 6], {"strategy": "ring", "mesh": "1x3", "mask": "causal"}
        with form("host", other) as host, form(process_group=other) as group:
            assert group.rank == dist.get_rank(other) == (rank + 1) % 3
            rank = group.rank
            assert same(both_ways(group, counts, **options)[0], both_ways(host, counts, **options)[0])
        """,
    )


def test_a_rank_that_cannot_is_named_on_all_ranks(tmp_path):
    run(
        3,
        tmp_path,
        """
        words = "torch.distributed is not used: rank 1: its device is ", "not one of PyTorch", 'use collective="host"'
        refused(lambda: form(device="cpu" if rank == 1 else "torch:cpu"), *words)
        refused(lambda: form(nccl_cluster=1), "nccl_cluster")
        if rank == 2:
            os.environ["GLOO_SOCKET_IFNAME"] = "nonsense"
        refused(lambda: form(deadline_s=20), "torch.distributed is not used: rank 2: ", "nonsense")
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        with form("host") as group:
            assert group.size == 3
        with form() as group:
            assert group.collective == "torch.distributed (gloo)"
        """,
    )


def test_trial_messages_with_other_bytes_are_seen(tmp_path):
    run(
        2,
        tmp_path,
        """
        class Nothing:
            def wait(self, timeout): pass
        _messages.dist.batch_isend_irecv = lambda parts: [Nothing()]
        refused(form, "torch.distributed is not used: rank 0: a trial message had arrived with other bytes than were sent")
        """,
    )


def test_a_device_with_streams_is_asked_until_its_messages_have_moved(monkeypatch):
    """What GPUs do, without one: works that say when they are done, and a backend that tells of its error."""
    import torch
    from torch._C._distributed_c10d import ErrorType

    from kyklos._device import _messages

    monkeypatch.setattr(_messages.time, "sleep", lambda seconds: pauses.append(seconds))
    pauses, waited, error = [], [], ErrorType.SUCCESS
    backend = type("Backend", (), {"get_error": lambda self: error})()
    messages = object.__new__(_messages.Messages)
    messages._of_cpu, messages._stream, messages._abandoned, messages.device = False, None, False, torch.device("cpu")
    messages._group = type("Group", (), {"_get_backend": lambda self, device: backend})()

    class Work:
        def __init__(self, looks):
            self.looks = looks

        def is_completed(self):
            self.looks -= 1
            return self.looks < 0

        def wait(self):
            waited.append(self.looks)

    def exchange(*looks):
        made = object.__new__(_messages.Exchange)
        made._messages, made._works = messages, [Work(count) for count in looks]
        return made

    moved = exchange(20, 3)
    moved.wait()
    assert len(pauses) == 23 and pauses == sorted(pauses) and pauses[-1] == _messages.PAUSE and not waited
    moved.order()
    assert len(waited) == 2 and max(waited) < 0
    error = ErrorType.COMM_ERROR
    with pytest.raises(ValueError, match="the backend has an error: COMM_ERROR"):
        exchange(0).wait()
    messages._abandoned = True
    with pytest.raises(RuntimeError, match="left"):
        exchange(1 << 60).wait()


def test_there_must_be_a_process_group():
    import kyklos

    for how in (kyklos.Group.from_env, lambda **options: kyklos.Group.local(2, **options)):
        with pytest.raises(kyklos.RequestError, match='collective="torch" without a process group: form the group with .*from_torch'):
            how(device="cpu", collective="torch")


def test_a_process_that_is_killed_is_named(tmp_path):
    """In the middle of a call: the others wait for its messages."""
    body = """
    group = form()
    counts, options = [8, 8, 8], {"strategy": "ring", "mesh": "1x3", "mask": "full"}
    both_ways(group, counts, **options)
    if rank == 1:
        _messages.Messages.post = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
    for attempt in range(2):
        try:
            both_ways(group, counts, **options)
        except kyklos.GroupError as error:
            print(error.peer, "rank 1" in str(error), flush=True)
    group.close()
    print("end", flush=True)
    """
    (code, out, err), (killed, _, _), (other_code, other_out, other_err) = ends(start(3, tmp_path, body))
    assert killed == -9
    assert code == other_code == 0, err + other_err
    assert out == other_out == "1 True\n1 True\nend\n", out + other_out + err + other_err


def test_a_message_that_does_not_come_ends_at_the_deadline(tmp_path):
    """A rank that is stuck. The group is not used any more, and another one is."""
    run(
        2,
        tmp_path,
        """
        group = form(deadline_s=10)
        counts, options = [8, 8], {"strategy": "ring", "mesh": "1x2", "mask": "full"}
        wanted, _ = both_ways(group, counts, **options)
        post = _messages.Messages.post
        if rank == 1:
            def late(*args):
                while not os.path.exists(f"{folder}/late"):
                    time.sleep(0.05)
                return post(*args)
            _messages.Messages.post = late
        for attempt in range(2):
            before = len(by_torch)
            try:
                both_ways(group, counts, **options)
            except kyklos.GroupError as error:
                print(error, file=sys.stderr)
                assert rank == 1 or attempt or error.peer == 1, error
                open(f"{folder}/late", "w").close()
            else:
                raise AssertionError("no error")
            # Nothing is tried any more.
            assert attempt == 0 or len(by_torch) == before
        group.close()
        _messages.Messages.post = post
        with form() as group:
            assert same(both_ways(group, counts, **options)[0], wanted)
        """,
    )


def test_an_exception_ends_the_group_and_its_processes_as_it_should(tmp_path):
    """No thread waits for a message when the interpreter ends: that would end the process by a signal."""
    body = """
    with form() as group:
        both_ways(group, [8, 8, 8], mask="full")
        if rank == 1:
            raise KeyError("mine")
        both_ways(group, [8, 8, 8], mask="full")
    """
    found = ends(start(3, tmp_path, body))
    assert [code for code, _, _ in found] == [1, 1, 1], found
    assert "KeyError: 'mine'" in found[1][2]
    assert all("GroupError: rank 1 failed: KeyError: 'mine'" in found[rank][2] for rank in (0, 2)), found


def test_a_group_that_is_closed_late_or_never(tmp_path):
    """After the process group, and by the end of the interpreter."""
    run(
        2,
        tmp_path,
        """
        first, second = form(), form()
        counts, options = [8, 8], {"mask": "full"}
        both_ways(first, counts, **options)
        both_ways(second, counts, **options)
        destroy, dist.destroy_process_group = dist.destroy_process_group, lambda *a: None
        destroy()
        first.close()
        """,
    )
