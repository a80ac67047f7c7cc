"""The helper's side."""

from __future__ import annotations

from collections.abc import Callable

from .. import _kyklos


def help_out(
    token: str,
    device: str = "auto",
    *,
    memory_gib: float | None = None,
    once: bool = False,
    tell: Callable[[str], object] = print,
) -> None:
    """Helps the owner whose token this is, as the program's ``kyklos help-out`` does, until Ctrl-C. Needs no model and no PyTorch.

    ::

        python -c "import kyklos; kyklos.help_out('kyklos1....@10.0.0.7:29700')"

    :param token: of :meth:`kyklos.Helpers.invite`.
    :param device: on which it computes: ``"auto"``, ``"cpu"``, ``"wgpu:N"``, ``"cuda:N"``, or ``"torch:DEVICE"`` for PyTorch's kernels.
    :param memory_gib: of tensors that it takes at a time; half of the machine's memory by default.
    :param once: return when the owner lets it go; else it waits for the owner to come again.
    :param tell: gets lines for people.
    :raises RequestError: for a text that is no token, and an unknown device.
    :raises GroupError: if the owner does not take the token.
    """
    memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
    try:
        _kyklos.help_out(token, device, memory_bytes, once, tell)
    except KeyboardInterrupt:
        tell("this machine helps no more")
