"""Ranks as processes: each runs a script that finds ``group``, ``rank`` and NumPy's ``np``, over QUIC with mutual TLS."""

import json
import subprocess
import sys
import textwrap

import kyklos
from kyklos._kyklos import free_port

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


def start(*scripts):
    """Starts a process for each script."""
    port = free_port("127.0.0.1")
    started = []
    for rank, (script, pem) in enumerate(zip(scripts, kyklos.identities(len(scripts)), strict=True)):
        process = subprocess.Popen(
            [sys.executable, "-c", _PREFIX + textwrap.dedent(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        own = {"identity": pem, "rank": rank, "size": len(scripts), "host": "127.0.0.1", "port": port}
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
