"""Groups: how they form, how they end, and what the other ranks see."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from oracle import F32, attention, causal
from processes import finish, start

import kyklos
from kyklos._kyklos import free_port


def test_processes_over_quic_equal_the_oracle(tmp_path):
    random = np.random.default_rng(5)
    q, k, v = (random.standard_normal((1, 30, heads, 16), dtype=np.float32) for heads in (4, 2, 2))
    np.savez(tmp_path / "in.npz", q=q, k=k, v=v)
    script = f"""
        arrays = np.load({str(tmp_path / "in.npz")!r})
        s = [slice(0, 11), slice(11, 30)][rank]
        with group:
            assert "rank" in repr(group) and group.network
            o, lse = group.attend(*(arrays[name][:, s] for name in "qkv"), mask="causal")
        np.savez({str(tmp_path)!r} + f"/out{{rank}}.npz", o=o, lse=lse)
    """
    for out, err, code in finish(start(script, script)):
        assert code == 0, out + err
    parts = [np.load(tmp_path / f"out{rank}.npz") for rank in range(2)]
    want = attention(q, k, v, visible=causal(30, 30))
    for name, other in zip(("o", "lse"), want, strict=True):
        assert np.abs(np.concatenate([part[name] for part in parts], axis=1) - other).max() < 4 * F32


NAMED = """
    try:
        while True:
            group.attend(ones, ones, ones)
            say("called")
    except kyklos.GroupError as error:
        say("error", error.peer, time.monotonic(), error)
"""


def test_a_killed_rank_is_named():
    processes = start(NAMED, NAMED)
    assert processes[0].stdout.readline() == "called\n"
    killed = time.monotonic()
    processes[1].kill()
    (out, err, code), _ = finish(processes)
    assert code == 0, out + err
    line = next(line for line in out.splitlines() if line.startswith("error"))
    _, peer, when, *text = line.split()
    assert peer == "1" and "died" in " ".join(text)
    # The transport's limit is 2.4 s of silence, the call's 30 s; the rest is for a busy machine.
    assert float(when) - killed < 25


def test_a_signal_ends_the_call_and_the_others_name_the_rank():
    waits = """
        try:
            say("waiting")
            group.attend(ones, ones, ones)
        except KeyboardInterrupt:
            say("interrupted", time.monotonic())
    """
    other = """
        # Until the other rank was interrupted.
        sys.stdin.readline()
        try:
            group.attend(ones, ones, ones)
        except kyklos.GroupError as error:
            say("error", error.peer, error)
    """
    processes = start(waits, other)
    assert processes[0].stdout.readline() == "waiting\n"
    time.sleep(0.3)
    sent = time.monotonic()
    processes[0].send_signal(signal.SIGINT)
    interrupted = processes[0].stdout.readline()
    processes[1].stdin.write("\n")
    processes[1].stdin.flush()
    (_, err, code), (out1, err1, code1) = finish(processes)
    assert (code, code1) == (0, 0), interrupted + err + out1 + err1
    # The time limit of a call is 30 s.
    assert interrupted.startswith("interrupted") and float(interrupted.split()[1]) - sent < 20
    assert out1.startswith("error 0") and "KeyboardInterrupt" in out1


def test_an_exception_in_the_block_ends_the_others_with_its_text():
    raises = """
        with group:
            group.attend(ones, ones, ones)
            raise OSError("no more disk")
    """
    (_, err, code), (out, err1, code1) = finish(start(raises, NAMED))
    assert code == 1 and "no more disk" in err
    assert code1 == 0 and "error 0" in out and "OSError: no more disk" in out, out + err1


def test_a_rank_that_just_ends_closes_the_group():
    ends = "group.attend(ones, ones, ones)"
    waits = """
        group.attend(ones, ones, ones)
        try:
            group.attend(ones, ones, ones)
        except kyklos.GroupError as error:
            say("error", error)
    """
    (_, err, code), (out, err1, code1) = finish(start(ends, waits))
    assert (code, code1) == (0, 0), err + err1
    assert "error" in out and "rank 0" in out and "died" not in out, out


def test_after_a_lost_group_the_process_forms_another():
    def call(group):
        if group.rank == 1:
            raise ZeroDivisionError("a fault of rank 1")
        ones = np.ones((1, 8, 2, 16), np.float32)
        with pytest.raises(kyklos.GroupError, match="a fault of rank 1") as raised:
            group.attend(ones, ones, ones)
        assert raised.value.peer == 1
        with pytest.raises(kyklos.GroupError):
            group.attend(ones, ones, ones)

    with pytest.raises(ZeroDivisionError):
        kyklos.run_local(2, call, device="cpu")
    ones = np.ones((1, 8, 2, 16), np.float32)
    assert len(kyklos.run_local(2, lambda group: group.attend(ones, ones, ones), device="cpu")) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_child_is_refused_and_leaves_the_parents_group_alone():
    script = """
        import os, sys
        import numpy as np
        import kyklos
        ones = np.ones((1, 8, 2, 16), np.float32)
        group = kyklos.Group.local(1, device="cpu")[0]
        group.attend(ones, ones, ones)
        child = os.fork()
        if child == 0:
            try:
                group.attend(ones, ones, ones)
            except kyklos.GroupError as error:
                print("child:", error, flush=True)
            try:
                kyklos.Group.local(1, device="cpu")
            except kyklos.RequestError as error:
                print("child:", error, flush=True)
            sys.exit(0)  # With atexit, which must not close the parent's group.
        assert os.waitpid(child, 0)[1] == 0
        group.attend(ones, ones, ones)
        print("parent: done", flush=True)
    """
    import textwrap

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "child: the group was formed before this process was forked" in done.stdout
    assert "child: a group in a process that was forked" in done.stdout
    assert "parent: done" in done.stdout


def test_threads_run_while_a_call_waits():
    """A waiting call does not hold the interpreter's lock."""
    first, second = kyklos.Group.local(2, device="cpu")
    ones = np.ones((1, 8, 2, 16), np.float32)
    ticks, done = [], threading.Event()

    def wait():
        first.attend(ones, ones, ones)
        done.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    for _ in range(100):
        ticks.append(time.monotonic())
        time.sleep(0.01)
    assert not done.is_set() and len(ticks) == 100
    # A second call of the same rank is refused, not mixed with the first.
    with pytest.raises(kyklos.RequestError, match="another thread is in a call"):
        first.attend(ones, ones, ones)
    second.attend(ones, ones, ones)
    thread.join(20)
    assert done.is_set()


def test_a_closed_group_takes_no_calls():
    ones = np.ones((1, 8, 2, 16), np.float32)
    with kyklos.Group.local(1, device="cpu")[0] as group:
        group.attend(ones, ones, ones)
    group.close()
    with pytest.raises(kyklos.GroupError, match="closed"):
        group.attend(ones, ones, ones)


def test_groups_that_cannot_form_say_why(tmp_path):
    with pytest.raises(kyklos.RequestError, match="quantum"):
        kyklos.Group.local(1, device="quantum")
    with pytest.raises(kyklos.RequestError, match="3 devices for 2 ranks"):
        kyklos.Group.local(2, device=["cpu"] * 3)
    with pytest.raises(kyklos.RequestError, match="ranks"):
        kyklos.Group.local(0)
    with pytest.raises(kyklos.RequestError, match="network"):
        kyklos.Group.from_env(network="pigeon")
    with pytest.raises(kyklos.RequestError, match="join_deadline_s"):
        kyklos.Group.from_env(join_deadline_s=-1)
    with pytest.raises(kyklos.RequestError, match="identity"):
        kyklos.Group.from_env(rank=0, size=2, coordinator="127.0.0.1:29999")
    with pytest.raises(kyklos.GroupError, match="is not an identity"):
        kyklos.Group.connect("no PEM", rank=0, size=2, host="127.0.0.1", port=29998)
    missing = kyklos.identities(2)[1]
    with pytest.raises(kyklos.GroupError):
        kyklos.Group.connect(missing, rank=1, size=2, host="127.0.0.1", port=29997, join_deadline_s=1)
    with kyklos.Group.from_env(device="cpu") as group:
        assert (group.rank, group.size) == (0, 1)


def test_the_port_of_rank_0_is_none_that_systems_give_to_sockets_without_one():
    ports = {free_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 10 and all(20_000 <= port < 29_000 for port in ports), ports
    # No name has such a character, so nothing is asked of the network.
    with pytest.raises(kyklos.GroupError, match="no free port for rank 0 at a\0b"):
        free_port("a\0b")


def test_many_calls_of_changing_shapes_keep_memory_flat():
    script = """
        import resource
        import numpy as np
        import kyklos
        random = np.random.default_rng(0)
        def calls(group, count):
            for index in range(count):
                tokens = 1 + index % 37
                q = np.ones((1, tokens, 4, 64), np.float32)
                group.attend(q, q, q, mask="causal")
        group = kyklos.Group.local(1, device="cpu")[0]
        calls(group, 2000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        calls(group, 4000)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    import textwrap

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown_kib = int(done.stdout)
    # Three arrays and an output of up to 37 KiB for each call: a leak of one of them would be 100 MiB.
    assert grown_kib < 8 * 1024


def test_a_call_that_a_rank_left_out_is_an_error_of_all_ranks():
    """Rank 1 fails before its session knows of the call, and goes on with the next ones: none meets a call of another place."""

    def work(group):
        x = np.full((1, 4, 2, 8), group.rank, np.float32)
        if group.rank == 1:
            with pytest.raises(TypeError):
                group.attend(x, x, x, x, x)
        errors = []
        for call in (lambda: group.attend(x, x, x), lambda: group.kv_cache(2, 8), lambda: group.backward(x, x, x, x, x[..., 0], x)):
            with pytest.raises(kyklos.RequestError) as raised:
                call()
            errors.append(str(raised.value))
        return errors

    of_rank_0, of_rank_1 = kyklos.run_local(2, work, device="cpu")
    assert of_rank_0 == of_rank_1
    for n, error in enumerate(of_rank_0):
        assert f"call {n + 1} of its session" in error and f"call {n}" in error


def test_calls_that_all_ranks_left_out_do_no_harm():
    def work(group):
        x = np.full((1, 4, 2, 8), group.rank, np.float32)
        with pytest.raises(TypeError):
            group.attend(x, x)
        return group.attend(0 * x, x, x)[0]

    assert all((o == 0.5).all() for o in kyklos.run_local(2, work, device="cpu"))
