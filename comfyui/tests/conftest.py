"""The pack as ComfyUI imports it, helpers that compute in this process, and attention functions that keep ComfyUI's contract."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[1]


def _pack():
    """ComfyUI imports a folder by its path, under a name that is no package's."""
    spec = importlib.util.spec_from_file_location("kyklos_pack", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pack = _pack()


@pytest.fixture
def sharing():
    from kyklos_pack import sharing

    sharing._opened.clear()
    yield sharing
    sharing._opened.clear()


class Invitation:
    def __init__(self, name):
        self.name = name
        self.token = f"kyklos1{name}@192.168.1.20:4242"
        self.command = f"kyklos help-out {self.token}"


class Helpers:
    """The interface of ``kyklos.Helpers``. One helper computes the last ``heads`` heads in f64."""

    def __init__(self, heads=1):
        self.heads = heads
        self.calls = []
        self.error = None
        self.closed = False

    def status(self):
        state = {"name": "laptop", "state": "ready", "device": "iGPU", "share": 0.25, "why": ""}
        return [{**state, "calls": len(self.calls), "bytes_sent": 1, "bytes_received": 2}]

    def invite(self, name, address=None, port=None):
        self.invited = (name, address, port)
        return Invitation(name)

    def attention(self, original, q, k, v, *, mask=None, scale=None, causal=False, gqa=False):
        import torch

        self.calls.append({"q": q, "k": k, "v": v, "mask": mask, "scale": scale, "causal": causal, "gqa": gqa})
        if self.error is not None:
            raise self.error
        group = q.shape[1] // k.shape[1]
        first = q.shape[1] - self.heads * group
        if self.heads == 0 or first <= 0:
            return original(q, k, v, mask)
        cut = k.shape[1] - self.heads

        def heads(begin, end):
            return None if mask is None else mask if mask.shape[1] == 1 else mask[:, begin:end]

        here = original(q[:, :first], k[:, :cut], v[:, :cut], heads(0, first))
        there = truth(q[:, first:], k[:, cut:], v[:, cut:], heads(first, q.shape[1]), scale)
        return torch.cat([here, there.to(q.dtype)], 1)

    def close(self):
        self.closed = True


def truth(q, k, v, mask=None, scale=None):
    """Attention in f64 of tensors ``[batch, heads, tokens, dim]``."""
    import torch

    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    logits = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    return logits.softmax(3) @ v


def comfy_attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """What ComfyUI's functions promise."""
    import torch

    if not skip_reshape:
        dim = q.shape[2] // heads
        q, k, v = (t.view(t.shape[0], t.shape[1], -1, dim).transpose(1, 2) for t in (q, k, v))
    assert q.shape[1] == heads
    if mask is not None:
        mask = mask[(None,) * (3 - mask.ndim)] if mask.ndim < 3 else mask
        mask = mask[:, None] if mask.ndim == 3 else mask
    options = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return o if skip_output_reshape else o.transpose(1, 2).reshape(o.shape[0], o.shape[2], -1)


def called(function, *args, **kwargs):
    """A call as ComfyUI makes it: by way of the override of the options, once."""
    options = kwargs.get("transformer_options") or {}
    kwargs["_inside_attn_wrapper"] = True
    override = options.get("optimized_attention_override")
    return function(*args, **kwargs) if override is None else override(function, *args, **kwargs)


class Model:
    """A model of ComfyUI, as far as nodes see it. Clones copy their options deeply, as in ComfyUI before 2026."""

    def __init__(self, options=None):
        self.model_options = {"transformer_options": options or {}}

    def clone(self):
        import copy

        return Model(copy.deepcopy(self.model_options["transformer_options"]))

    @property
    def options(self):
        return self.model_options["transformer_options"]


@pytest.fixture
def helpers(sharing, monkeypatch):
    """Helpers that ``kyklos.helpers()`` opens."""
    made = Helpers()
    module = types.ModuleType("kyklos")
    module.opened = []
    module.helpers = lambda names=None, *, devices=(), wire="same": (module.opened.append((names, devices, wire)), made)[1]
    monkeypatch.setitem(sys.modules, "kyklos", module)
    made.module = module
    return made
