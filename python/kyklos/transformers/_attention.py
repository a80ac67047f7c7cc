"""The attention function of split models: one call of the group for each layer."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .._errors import RequestError
from .._group import Group
from .._rows import without_backward
from .._arrays.torch import readable, readable_bias
from . import _masks as masks
from ._cache import SplitCache
from ._differentiable import attend
from ._masks import CAUSAL, FULL, MaskRule
from ._steps import LayerCall, Step, label

#: ``config._attn_implementation`` of a split model.
NAME = "kyklos"

# Arguments of attention functions that change nothing here, and those that are read below.
_WITHOUT_EFFECT = {
    "position_ids",
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "logits_to_keep",
    "num_items_in_batch",
}
# Passes without gradients.
_CACHED = "a pass of a split model with a cache has no gradients: pass use_cache=False, or run it under torch.no_grad()"
_FEW_TOKENS = (
    "a pass of a split model over one token, or over fewer tokens than ranks, has no gradients: pass longer texts, or run it "
    "under torch.no_grad()"
)
_KNOWN = _WITHOUT_EFFECT | {"is_causal", "sliding_window", "softcap", "s_aux", "output_attentions", "position_bias", "alibi"}


@dataclass
class Forward:
    """One forward pass of a model, on this rank."""

    group: Group
    #: Names of modules, for errors and labels.
    names: dict[torch.nn.Module, str]
    #: Beginning of the label of each call, the same on all ranks.
    label: str
    #: Tokens of each rank, or ``None`` if all ranks compute all of them.
    counts: list[int] | None
    tokens: int
    #: How the calls of a pass that is split run.
    execution: dict[str, Any] = field(default_factory=dict)
    cache: SplitCache | None = None
    padding: str | torch.Tensor | None = None
    documents: list[list[int]] | None = None
    #: The mask of all layers, if a model around this one has made one.
    rule: MaskRule | None = None
    #: The numbers ``[batch, keys]`` by which layers with chunks count tokens.
    places: torch.Tensor | None = None
    #: The largest of ``position_ids``, over all ranks.
    longest: int = 0
    #: Names of the modules that have attended.
    attended: list[str] = field(default_factory=list)
    #: Names of those that have mixed tokens in another way.
    mixed: list[str] = field(default_factory=list)
    #: What these get of all tokens beside the states, by argument.
    whole: dict[str, Any] = field(default_factory=dict)
    #: Rules of their masks.
    rules: list[MaskRule] = field(default_factory=list)
    #: In a trial the group does not attend: it is only recorded which modules do, and how.
    trial: bool = False
    #: Then of each call the heads of queries and of keys, the head dim and the type.
    shapes: list[tuple[int, int, int, torch.dtype]] = field(default_factory=list)
    #: Then layers that mix tokens in another way compute one token only.
    skips_mixers: bool = False
    #: This rank's rows that the pooler was to get, and those of all ranks.
    pooled: tuple[torch.Tensor, torch.Tensor] | None = None
    #: The calls of a pass with a cache that all ranks compute.
    step: Step | None = None
    #: Masks with a row for each query, and numbers that are added for each key, which layers share.
    biases: dict[Any, torch.Tensor] = field(default_factory=dict)
    #: Boundaries of chunks, by their size.
    chunks: dict[int, list[list[int]]] = field(default_factory=dict)

    @property
    def own(self) -> int:
        """Tokens that this rank computes."""
        return self.tokens if self.counts is None else self.counts[self.group.rank]

    @property
    def first(self) -> int:
        """The first token that this rank computes, those of the cache not counted."""
        return 0 if self.counts is None else sum(self.counts[: self.group.rank])

    def attend(
        self, module: torch.nn.Module, states: list[torch.Tensor], mask: Any, options: dict[str, Any]
    ) -> torch.Tensor:
        """``[batch, tokens, heads, dim of values]`` of this rank's queries; ``states`` are ``[batch, heads, tokens, dim]``."""
        name = self.names.get(module, type(module).__name__)
        rule = checked(name, module, mask, options)
        self.attended.append(name)
        self.rules.append(rule)
        query, key, value = states
        if self.trial:
            batch, heads, tokens, _ = query.shape
            placed = _prepared(query, key, value)
            self.shapes.append((heads, key.shape[1], placed[0].shape[3], placed[0].dtype))
            return value.new_zeros(batch, tokens, heads, value.shape[3])
        if any(state.shape[2] != self.own for state in states):
            raise RequestError(
                f"attention at {name} has {query.shape[2]} queries and {key.shape[2]} keys, of {self.own} tokens of this rank: "
                "cross-attention and attention over pooled tokens cannot be split"
            )
        if mask is None and self.padding is not None:
            raise RequestError(f"attention at {name} gets no mask, and the batch has padding: pass texts of one length")
        if options.get("position_bias") is not None and (self.cache is not None or self.counts is None):
            raise RequestError(f"attention at {name} has a bias of positions, in a pass that all ranks compute: run this model on one rank")
        layer = None if self.cache is None else self.cache.take(name, key.shape[2])
        width = value.shape[3]
        alibi = self._alibi(options["alibi"], query) if options.get("alibi") else None
        query, key, value = _prepared(query, key, value, bias=alibi)
        call = {**self._options(name, rule, options, states[0].shape[3]), **self._biases(rule, alibi, query)}
        sinks = options.get("s_aux")
        if layer is None and self.counts is not None:
            states = readable(self.group, *(state.transpose(1, 2) for state in (query, key, value)))
            bias = self._bias(name, options.get("position_bias"), call, query.dtype)
            o = attend(self.group, states, sinks, bias, call)
            return o[..., :width].contiguous().to(query.device)
        call["sinks"] = None if sinks is None else sinks.detach().to("cpu", torch.float32).tolist()

        def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            placed = readable(self.group, *(state.transpose(1, 2) for state in (query, key, value)))
            if layer is not None:
                store = layer.make(key, rule.window)
                if self.step is not None:
                    o = self.step.attend(LayerCall(name, store, _kind(rule, call, placed)), placed, call)
                else:
                    o, _ = self.group.attend_cached(store, *placed, **call)
            else:
                if self.group.rank > 0:
                    # All ranks have all keys; those of rank 0 count.
                    placed[1:] = [state[:, :0] for state in placed[1:]]
                o, _ = self.group.attend(*placed, **call)
            return o[..., :width].contiguous().to(query.device)

        return without_backward(run, _FEW_TOKENS if layer is None else _CACHED, query, key, value)

    def _bias(self, name: str, bias: torch.Tensor | None, call: dict[str, Any], dtype: torch.dtype) -> torch.Tensor | None:
        """The bias of a call, which may have gradients. A bias of positions ``[batch or 1, heads, own tokens, tokens]`` also has the holes of the
        padding, since a call takes one of both."""
        if bias is None:
            return call.pop("bias", None)
        if bias.shape[2:] != (self.own, self.tokens):
            raise RequestError(
                f"attention at {name} has a bias of shape {tuple(bias.shape)} for {self.own} queries of this rank and {self.tokens} keys of all "
                "ranks: run this model on one rank"
            )
        holes = call.pop("key_bias", None)
        if holes is not None:
            bias = bias.masked_fill(~holes.to(bias.device)[:, None, None], -torch.inf)
        return readable_bias(self.group, bias.transpose(1, 2).to(dtype).contiguous())

    def _options(self, name: str, rule: MaskRule, options: dict[str, Any], dim: int) -> dict[str, Any]:
        right = self.padding if isinstance(self.padding, str) else None
        scale = options.get("scaling")
        return {
            "mask": masks.mask_text(rule, self._boundaries(rule), right),
            "scale": dim**-0.5 if scale is None else float(scale),
            "softcap": options.get("softcap"),
            "layout": "bshd",
            "same_queries": self.counts is None,
            "label": label(self.label, name),
            **({} if self.counts is None else self.execution),
        }

    def _boundaries(self, rule: MaskRule) -> list[list[int]] | None:
        """Of documents and chunks, where the mask has no rows, which know them."""
        if rule.rows is not None:
            return None
        if rule.chunk is not None and self.places is not None:
            if rule.chunk not in self.chunks:
                self.chunks[rule.chunk] = masks.chunks(rule.chunk, self.places, self.documents)
            return self.chunks[rule.chunk]
        return self.documents

    def _biases(self, rule: MaskRule, alibi: torch.Tensor | None, query: torch.Tensor) -> dict[str, torch.Tensor]:
        """The options of a call that are arrays: what hides keys beside the text of the mask, and what is added to logits."""
        holes = self.padding if isinstance(self.padding, torch.Tensor) else None
        if alibi is not None and rule.rows is not None:
            raise RequestError("ALiBi with tokens that see each other: run this model on one rank")
        if alibi is not None:
            alibi = alibi.to("cpu", query.dtype)
            return {"key_bias": alibi if holes is None else alibi.masked_fill(~holes[:, None], -torch.inf)}
        if rule.rows is None:
            return {} if holes is None else {"key_bias": holes}
        if rule not in self.biases:
            rows = rule.rows(self.first, self.first + self.own).to("cpu")
            self.biases[rule] = (rows if holes is None else rows & holes[:, None, None]).transpose(1, 2).contiguous()
        return {"bias": self.biases[rule]}

    def _alibi(self, alibi: Callable[[torch.Tensor], torch.Tensor], query: torch.Tensor) -> torch.Tensor:
        """What is added to the logits of each key, ``[batch, heads, keys]``."""
        if "alibi" not in self.biases:
            shape = (query.shape[0], self.tokens + (0 if self.cache is None else self.cache.length))
            visible = self.padding if isinstance(self.padding, torch.Tensor) else torch.ones(shape)
            self.biases["alibi"] = alibi(visible.to(query.device, torch.long))
        return self.biases["alibi"]


def _kind(rule: MaskRule, call: dict[str, Any], states: list[torch.Tensor]) -> tuple[Any, ...]:
    """What calls of one step must have in common to be made after one vote. Texts of masks and padding belong to the step."""
    options = tuple(call[name] for name in ("scale", "softcap"))
    shapes = tuple((state.shape[0], state.shape[2], state.shape[3]) for state in states)
    return (rule, *options, tuple(call["sinks"] or ()), *shapes, states[0].dtype)


_current: ContextVar[Forward | None] = ContextVar("kyklos_forward", default=None)


def current() -> Forward | None:
    """The forward pass that this thread is in."""
    return _current.get()


class entered:
    """A block in which ``forward`` is the current one."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __enter__(self) -> Forward:
        self._token = _current.set(self._forward)
        return self._forward

    def __exit__(self, *_: Any) -> None:
        _current.reset(self._token)


def mask(**given: Any) -> MaskRule:
    """The mask function of ``attn_implementation="kyklos"``."""
    forward = current()
    if forward is not None and forward.rule is not None:
        return forward.rule
    return masks.rule_of(whole=forward is None, **given)


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of ``attn_implementation="kyklos"``.

    :param query: ``[batch, heads, tokens, dim]`` of this rank's tokens, after rotary positions; ``key`` and ``value`` with their
        own number of heads.
    :param attention_mask: a :class:`MaskRule`, or ``None``: then ``is_causal`` decides.
    :param options: ``alibi`` is called with 1 for each visible token and 0 for others, ``[batch, keys]``, and returns what is added to the
        logits of each key, ``[batch, heads, keys]``.
    :returns: ``[batch, tokens, heads, dim]``, and no weights.
    """
    forward = current()
    if forward is None:
        raise RequestError(
            'a layer with attn_implementation="kyklos" outside of a split model: call kyklos.transformers.parallelize(model, '
            "group) and then the model, not one of its parts"
        )
    options = {**options, "scaling": scaling, "dropout": dropout}
    return forward.attend(module, [query, key, value], attention_mask, options), None


def checked(name: str, module: torch.nn.Module, mask: Any, options: dict[str, Any]) -> MaskRule:
    """The mask rule of a call; refuses arguments that would have no effect."""
    if options["dropout"]:
        raise RequestError(f"attention at {name} asks for dropout {options['dropout']}: call model.eval()")
    if options.get("output_attentions"):
        raise RequestError(
            f"attention at {name} is asked for its weights, which are never made: leave out output_attentions"
        )
    for argument, value in options.items():
        if argument not in _KNOWN | {"scaling", "dropout"} and value is not None and value is not False:
            raise RequestError(
                f"attention at {name} gets the argument {argument}, which is not known here: run this model on one rank"
            )
    if isinstance(mask, MaskRule):
        rule = mask
    elif mask is None:
        causal = options.get("is_causal")
        rule = CAUSAL if (getattr(module, "is_causal", True) if causal is None else causal) else FULL
    else:
        kind = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise RequestError(
            f"attention at {name} gets {kind} as its mask: pass attention_mask as [batch, tokens], or none"
        )
    window = options.get("sliding_window")
    # Some models count the query's own key, some do not.
    if window is not None and rule.rows is None and (rule.left is None or window - rule.left not in (0, 1)):
        raise RequestError(
            f"attention at {name} says sliding_window {window}, and its mask is {rule}: run this model on one rank"
        )
    return rule


def _prepared(*states: torch.Tensor, bias: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Query, key and value in one type, with heads of one size that kernels take: zeros in the end of a head change no product. Numbers that
    are added to logits are not rounded: they are large."""
    query = states[0]
    dtype = query.dtype
    if bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
    elif torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    dim = max(state.shape[3] for state in states)
    dim += -dim % 8
    same = (state.to(dtype) for state in states)
    return [
        torch.nn.functional.pad(state, (0, dim - state.shape[3])) if state.shape[3] < dim else state for state in same
    ]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
