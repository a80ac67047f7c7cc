"""Helpers in other processes, over sockets: they join by a token, and may go at any time."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F

import kyklos


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("KYKLOS_SETTINGS_DIR", str(tmp_path))


def free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(token):
    return subprocess.Popen(
        [sys.executable, "-c", f"import kyklos; kyklos.help_out({token!r}, 'cpu')"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(helpers, *states):
    for _ in range(1200):
        if helpers.status()[0]["state"] in states:
            return
        time.sleep(0.1)
    raise AssertionError(helpers.status())


@pytest.mark.slow
def test_a_helper_is_killed_frozen_and_started_again(settings):
    helpers = kyklos.helpers(_always=True)
    invitation = helpers.invite("kitchen", "127.0.0.1", free_port())
    assert helpers.invite("kitchen") == invitation
    moved = helpers.invite("kitchen", port=free_port())
    assert moved.token.split("@")[0] == invitation.token.split("@")[0] and moved != invitation
    invitation = moved
    assert kyklos.helpers(["kitchen"], _always=True).status()[0]["state"] == "waiting"
    q, k, v = torch.randn(3, 1, 6, 600, 64, generator=torch.Generator().manual_seed(1))
    want = F.scaled_dot_product_attention(q, k, v)
    process = None
    try:
        with helpers:
            for how in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
                process = start(invitation.token)
                wait_for(helpers, "ready")
                before = helpers.status()[0]["calls"]
                for call in range(6):
                    if call == 4:
                        os.kill(process.pid, how)
                    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), want)
                    if call < 4:
                        helpers.settle()
                assert helpers.status()[0]["calls"] > before
                wait_for(helpers, "lost")
                os.kill(process.pid, signal.SIGCONT)
                process.kill() if how is not signal.SIGINT else None
                text, _ = process.communicate(timeout=120)
                assert "joined the owner" in text, text
    finally:
        if process is not None:
            process.kill()
        helpers.close()


def test_what_is_no_token_is_refused():
    with pytest.raises(kyklos.GroupError, match="token"):
        kyklos.help_out("kyklos1.nothing", "cpu")
