"""Exact attention over a sequence that is split across ranks, on unlike devices.

::

    import kyklos

    with kyklos.Group.from_env() as group:
        o, lse = group.attend(q, k, v, mask="causal")  # this rank's tokens in, its rows out

:func:`helpers` lets other devices compute a share of this process' attention, without any group.

Modules for models, imported when they are used: :mod:`kyklos.torch` has a PyTorch operator,
:mod:`kyklos.transformers` and :mod:`kyklos.diffusers` split whole models. ``python -m kyklos`` tests an installation.
"""

from ._backward import Gradients
from ._cache import CachedCalls, KvCache
from ._errors import DeviceError, GroupError, RequestError
from ._group import Group, identities
from ._helpers import Helpers, Invitation, help_out, helpers
from ._kyklos import version as __version__
from ._local import run_local
from ._options import CallOptions, TokenRanges
from ._plan import Choice, Cluster, Plan, plan
from ._shares import Shares

__all__ = [
    "CachedCalls",
    "CallOptions",
    "Choice",
    "Cluster",
    "DeviceError",
    "Gradients",
    "Group",
    "GroupError",
    "Helpers",
    "Invitation",
    "KvCache",
    "Plan",
    "RequestError",
    "Shares",
    "TokenRanges",
    "__version__",
    "help_out",
    "helpers",
    "identities",
    "plan",
    "run_local",
]
