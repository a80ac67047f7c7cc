"""Ranks as processes: each runs a script that finds ``group``, ``rank`` and NumPy's ``np``, over QUIC with mutual TLS."""

import json
import random
import socket
import subprocess
import sys
import textwrap

import kyklos

_PREFIX = """
import json, os, signal, sys, time
import numpy as np
import kyklos
# Shells start programs in the background with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
own = json.loads(sys.stdin.readline())
group = kyklos.Group.connect(**own, device="cpu", join_deadline_s=30, deadline_s=30)
rank = group.rank
ones = np.ones((1, 8, 2, 16), np.float32)
def say(*words): print(*words, flush=True)
"""


def free_port():
    """A port that is free for UDP and TCP now. It lies below the ports that systems give to sockets without one: such a port could go to
    any other socket before a rank listens on it.
    """
    for port in random.SystemRandom().sample(range(10_000, 20_000), 100):
        kinds = socket.SOCK_DGRAM, socket.SOCK_STREAM
        with socket.socket(socket.AF_INET, kinds[0]) as udp, socket.socket(socket.AF_INET, kinds[1]) as tcp:
            try:
                udp.bind(("", port))
                tcp.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("none of 100 ports is free")


def start(*scripts):
    """Starts a process for each script."""
    port = free_port()
    started = []
    for rank, (script, pem) in enumerate(zip(scripts, kyklos.identities(len(scripts)), strict=True)):
        process = subprocess.Popen(
            [sys.executable, "-c", _PREFIX + textwrap.dedent(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        own = {"identity": pem, "rank": rank, "world": len(scripts), "host": "127.0.0.1", "port": port}
        process.stdin.write(json.dumps(own) + "\n")
        process.stdin.flush()
        started.append(process)
    return started


def finish(processes, seconds=40):
    """Output and exit code of each process; kills those that do not end."""
    ends = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "\nkilled: it did not end"
        ends.append((out, err, process.returncode))
    return ends
