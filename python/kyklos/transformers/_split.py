"""A model whose forward pass computes this rank's tokens."""

from __future__ import annotations

import functools
import inspect
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from .._errors import DeviceError, GroupError, RequestError
from .._group import Group
from .._models.agreement import Passes
from .._models.execution import checked_shares, drops, has_ring, share_out
from .._models.pace import Pace, Reach, Watch
from .._models.strategies import Strategies
from .._models.projections import compare_rows
from .._models.telling import told
from .._rows import gather
from . import _checks as checks
from . import _eager as eager
from . import _hooks as hooks
from . import _inputs as given_inputs
from . import _masks as masks
from ._attention import NAME, Forward, current, entered
from ._cache import CACHE, SplitCache, given_cache
from ._mixers import kinds, whole_mixers
from ._steps import Step

# The kind of layer of a mask that is of all layers.
ONE = ""
# Tokens of a text for which the shares of a cache are by pace.
_USUAL_TOKENS = 4096


class SplitModel:
    """The model's body (:attr:`base`, which ends with hidden states) computes the tokens of this rank; its head, if it has one,
    gets the rows of all ranks."""

    def __init__(
        self,
        model: PreTrainedModel,
        group: Group,
        execution: dict[str, Any],
        shares: str | Sequence[float] | None,
        gather: str,
        chooses: bool,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise RequestError(
                f"a {type(model).__name__} is no model of transformers: pass the PreTrainedModel inside of it"
            )
        self.model = model
        self.base = checks.body_of(model)
        self.group, self.execution, self.gather = group, execution, gather
        self.by_pace = isinstance(shares, str) and shares == "auto"
        self.shares = checked_shares(shares, group.size)
        #: With shares by it.
        self.pace: Pace | None = None
        self.attention: list[tuple[int, Reach]] = []
        self._watch: Watch | None = None
        self._chooses = chooses
        self._strategies: Strategies | None = None
        if gather not in ("auto", "none"):
            raise RequestError(f'gather is {gather!r}: use "auto" or "none"')
        checks.refuse_unsplittable(model, self.base)
        self.names = {module: name for name, module in self.base.named_modules()}
        #: Rows that the head asks for: the last so many, 0 for all.
        self.keep = 0
        #: Targets of all tokens, if the head computes a loss.
        self.labels: torch.Tensor | None = None
        #: Inputs of the model around the body, while it runs.
        self.outer: dict[str, Any] | None = None
        #: Rows go to all ranks whatever ``gather`` says: every rank chooses the next token.
        self.generating = False
        #: Whether the model makes other positions than :func:`checks.default_positions`: without padding, and with it.
        self.own_positions = [False, False]
        self._passes = Passes(group)
        self._implementation = self.base.config._attn_implementation
        self._run: Callable[..., Any] = self.base.forward
        self._undo: list[Callable[[], None]] = []

    def install(self, check: bool) -> None:
        """Replaces the forward pass of the body; with ``check`` compares it with the one that was there."""
        training = {module: module.training for module in self.base.modules()}
        self.base.eval()
        try:
            with checks.rotary_state_kept(self.base):
                self._install(check)
        except BaseException:
            self.remove()
            raise
        finally:
            for module, mode in training.items():
                module.training = mode

    def _install(self, check: bool) -> None:
        self._passes.check_weights(self.model)
        expected = self._expected() if check else None
        eager.choose(self.base, NAME)
        eager.install(self.base, self._undo)
        if self.base.config._attn_implementation != NAME:
            raise RequestError(
                f"{type(self.model).__name__} does not take another attention function: run it on one rank"
            )
        whole_mixers(self.base, self._undo)
        with checks.rotary_state_kept(self.base):
            self.traits = checks.traits_of(self.base, self._run, self.group, self.names)
        hooks.longest_position(self.base, self._undo)
        hooks.first_token(self.base, self._undo)
        hooks.whole_pooler_input(self.base, self._undo)
        names = list(inspect.signature(self._run).parameters)
        forward = functools.partial(SplitModel._forward, self, names)
        hooks.replace(self.base, "forward", functools.update_wrapper(forward, self._run), self._undo)
        if expected is not None:
            self._check(*expected)
        if self.by_pace:
            with checks.rotary_state_kept(self.base):
                own, least = checks.token_ns(self.base, self._run, self.group, self.names)
                whole = checks.whole_ns(self.base, self._run, self.group, self.names)
            self._watch = Watch(least) if self.group.rank == 0 else None
            speeds = self.group.speeds(_USUAL_TOKENS, **self.traits.call)
            self.pace = self._passes.pace(own, speeds, whole)
            self.attention = self.traits.attention if has_ring(self.group, self.execution) else []
            if self._chooses:
                cluster, wire = self.group.cluster(_USUAL_TOKENS, **self.traits.call), self.execution["wire"]
                self._strategies = Strategies(cluster, self.traits.call, self.traits.attention, wire)
            # Of the cache.
            self.shares = [float(count) for count in self.pace.counts(_USUAL_TOKENS, self.attention)]

    def remove(self) -> None:
        """Restores the model."""
        while self._undo:
            self._undo.pop()()
        if self.base.config._attn_implementation != self._implementation:
            eager.choose(self.base, self._implementation)

    def rows(self, tokens: int) -> tuple[int, int]:
        """The rows of this rank, as a half-open range, of a pass over ``tokens`` tokens."""
        counts = self.counts(tokens)
        if counts is None:
            return 0, tokens
        first = sum(counts[: self.group.rank])
        return first, first + counts[self.group.rank]

    def cache(self, rollback: int = 0) -> SplitCache:
        """An empty cache for this model."""
        if self.traits.mixers and not self.traits.caches:
            raise RequestError(f"a cache for {type(self.model).__name__}, which keeps its states in a way of its own: pass use_cache=False")
        if rollback and self.traits.mixers:
            raise RequestError(f"rollback={rollback} for {type(self.model).__name__}, whose states cannot forget a part of the tokens: leave it out")
        return SplitCache(self.group, kinds(self.base), self.shares[self.group.rank], rollback)

    def _expected(self) -> tuple[dict[str, torch.Tensor], checks.States]:
        """The trial's inputs, and what the model as it is makes of them."""
        inputs = checks.trial_inputs(self.base, self.group.size)
        batch, tokens = inputs["input_ids"].shape
        positions = checks.default_positions(self.base, inputs["input_ids"], 0, (batch, tokens))
        alone = {"return_dict": True, **checks.without_cache(self.base)}
        with torch.no_grad():
            default = self._run(**inputs, **alone).last_hidden_state
            whole = self._run(**inputs, position_ids=positions, **alone)
        visible = inputs["attention_mask"]
        self.own_positions = [
            not checks.compare(default[text], whole.last_hidden_state[text], visible[text])[0] for text in range(batch)
        ]
        return {**inputs, "position_ids": positions}, checks.States.of(whole)

    def _check(self, inputs: dict[str, torch.Tensor], whole: checks.States) -> None:
        """Compares the split model with the model as it was."""
        kept = self.shares, self.gather, self.execution
        # Rounded keys and values are no fault of the model.
        self.shares, self.gather, self.execution = [1.0] * self.group.size, "auto", {**self.execution, "wire": None}
        try:
            with torch.no_grad():
                split = self._trial(inputs)
        finally:
            self.shares, self.gather, self.execution = kept
        equal, error = split.compare(whole, inputs["attention_mask"])
        if not equal:
            raise RequestError(
                f"{type(self.model).__name__} does not compute the same when it is split: the largest error of a "
                f"trial text is {error}, so parts of it look at the tokens of one rank only, or buffers differ between ranks; run it on one rank"
            )

    def _trial(self, inputs: dict[str, torch.Tensor]) -> checks.States:
        """What the split model makes of the inputs; of the last token with the others in a cache, if the model has one."""
        if not self.traits.caches:
            return checks.States.of(self.base(**inputs, return_dict=True, **checks.without_cache(self.base)))
        cache, mask = self.cache(), inputs["attention_mask"]
        first = {name: value[:, :-1] for name, value in inputs.items()}
        last = {**{name: value[:, -1:] for name, value in inputs.items()}, "attention_mask": mask}
        states = [
            self.base(**part, **{CACHE: cache}, return_dict=True).last_hidden_state for part in (first, last)
        ]
        return checks.States(torch.cat(states, 1))

    def _forward(self, names: list[str], /, *args: Any, **kwargs: Any) -> Any:
        """``forward`` of the body, whose arguments have these ``names``, for the inputs of all ranks."""
        if current() is not None:
            return self._run(*args, **kwargs)
        with told(self.group):
            try:
                return self._split({**dict(zip(names, args, strict=False)), **kwargs})
            except (RequestError, GroupError, DeviceError):
                raise
            except BaseException as error:
                self.group.abort(f"{type(error).__name__} in the model: {error}")
                error.told = True  # type: ignore[attr-defined]
                raise

    def _split(self, given: dict[str, Any]) -> Any:
        inputs = {name: value for name, value in given.items() if value is not None}
        self._refuse(inputs)
        tokens_of = inputs.get("inputs_embeds", inputs.get("input_ids"))
        if (
            tokens_of is None
            or tokens_of.dim() < 2
            or tokens_of.shape[1] == 0
            or len({"input_ids", "inputs_embeds"} & inputs.keys()) == 2
        ):
            raise RequestError(
                "a split model needs input_ids [batch, tokens] or inputs_embeds [batch, tokens, width], and some tokens"
            )
        batch, tokens = tokens_of.shape[:2]
        cache = self._cache_of(inputs)
        past = 0 if cache is None else cache.length
        positions = given_inputs.positions(self.base, inputs, past, (batch, tokens))
        mask, rules = self._mask_of(inputs)
        blocks = [block for kind in sorted(rules) for block in rules[kind].blocks]
        padding = masks.padding(mask, past + tokens)
        if "position_ids" not in inputs and self.own_positions[padding is not None]:
            raise RequestError(
                f"{type(self.base).__name__} makes positions of its own, which a rank cannot make from its tokens: "
                "pass position_ids"
            )
        if cache is not None:
            cache.check()
            if past == 0:
                cache.keeps_all = padding is not None or bool(blocks)
            elif (padding is not None or blocks) and not cache.keeps_all:
                self._refuse_late_padding(cache)
        packed = self.traits.packs and mask is None and cache is None
        counts = self.counts(tokens)
        # Passes with a cache have no gradients.
        number = self._passes.next(self.model, torch.is_grad_enabled() and cache is None)
        visible = mask.to(torch.bool) if mask is not None and mask.is_floating_point() else mask
        whose = zlib.crc32(f"{self.counts(tokens)} {self.gather}".encode())
        same = given_inputs.digest(tokens_of, positions, visible, self.labels, *blocks)
        label = f"{self._passes.model}, pass {number}, shares {whose:08x}, inputs {same},"
        compare_rows(self.group, {**given_inputs.embeddings(inputs), "labels": self.labels}, label)
        began = time.perf_counter()
        documents = masks.documents(given_inputs.places(positions).expand(batch, -1)) if packed else None
        forward = Forward(
            self.group,
            self.names,
            label,
            counts,
            tokens,
            self.execution_of(batch, counts, torch.is_grad_enabled() and cache is None),
            cache,
            padding,
            documents,
            rules.get(ONE),
            masks.places(mask, batch, past + tokens) if documents is None else given_inputs.places(positions).expand(batch, -1),
            int(positions.max()),
        )
        # As create_recurrent_attention_mask() of the library, which makes none without padding.
        forward.whole = {"position_ids": positions, "attention_mask": None if mask is None or padding is None else mask[:, past:]}
        if cache is not None and counts is None:
            forward.step = Step(self.group, forward.label, cache.last_step or [])
        first, end = self.rows(tokens)
        own = {**given_inputs.part(inputs, first, end), "position_ids": positions[..., first:end]}
        # With a mask the library does not look for packed documents in the positions of one rank.
        own["attention_mask"] = (
            torch.ones(batch, end - first, dtype=torch.long, device=tokens_of.device)
            if mask is None
            else mask[:, past + first : past + end]
        )
        if rules.keys() - {ONE}:
            own["attention_mask"] = rules
        if cache is not None:
            own |= {CACHE: cache, "use_cache": True}
        else:
            own |= checks.without_cache(self.base)
        others = {name: value for name, value in inputs.items() if name not in given_inputs.KNOWN}
        try:
            with entered(forward), hooks.recomputed(self.base, forward):
                output = self._run(**own, **others, return_dict=True)
                self.traits.check(forward)
                if counts is not None:
                    self._gather_output(output, forward)
                    self._compare_with_one_rank(past, (batch, tokens), began)
        except BaseException as error:
            if forward.step is not None:
                forward.step.end(error)
            if cache is not None:
                cache.restore()
            raise
        if cache is not None:
            cache.length += tokens
            if forward.step is not None and cache.last_step is not None:
                cache.last_step = forward.step.calls
        wanted = given.get("return_dict")
        return output if (self.base.config.return_dict if wanted is None else wanted) else output.to_tuple()

    def _refuse(self, inputs: dict[str, Any]) -> None:
        """Refuses what cannot be split or would have no effect."""
        config = self.base.config
        if inputs.get("output_attentions") or getattr(config, "output_attentions", False):
            raise RequestError("output_attentions of a split model: the weights are never made; leave it out")
        if inputs.get("output_router_logits") or getattr(config, "output_router_logits", False):
            raise RequestError("output_router_logits of a split model: a rank has those of its tokens only; leave it out")
        for name, value in inputs.items():
            if name not in given_inputs.KNOWN and (isinstance(value, (torch.Tensor, dict)) or name.startswith("cu_seq_lens")):
                raise RequestError(
                    f"a split model does not know how to split the input {name}: leave it out, or use one rank"
                )
        if drops(self.model):
            raise RequestError("dropout in a split model would differ between ranks: call model.eval()")

    def _cache_of(self, inputs: dict[str, Any]) -> SplitCache | None:
        cache = given_cache(inputs)
        if isinstance(cache, SplitCache):
            if cache.group is not self.group or cache.kinds != kinds(self.base) or not self.traits.caches:
                raise RequestError("a cache of another split model: make one with handle.cache()")
            return cache
        if cache is not None and (self.outer is None or given_cache(self.outer) is not None or cache.get_seq_length()):
            raise RequestError(
                f"a {type(cache).__name__} as past_key_values of a split model: make one with handle.cache()"
            )
        # A cache that the model around this one has made, which is empty.
        use = inputs.get("use_cache") if cache is None else True
        if use is None:
            # A cache has no gradients, and training does not use it.
            trains = torch.is_grad_enabled() and (self.base.training or self.labels is not None)
            return self.cache() if self.traits.caches_by_default and not trains else None
        return self.cache() if use and self.traits.caches else None

    def _mask_of(self, inputs: dict[str, Any]) -> tuple[torch.Tensor | None, dict[str, masks.MaskRule]]:
        """The ``attention_mask`` of the caller, and rules that a model around this one has made of it: by kinds of layers, or one for all."""
        given = inputs.get("attention_mask")
        if given is None or isinstance(given, torch.Tensor):
            return given, {}
        rules = given if isinstance(given, dict) else {ONE: given}
        if self.outer is None or not all(isinstance(rule, masks.MaskRule) for rule in rules.values()):
            raise RequestError(f"an attention_mask that is a {type(given).__name__}: call the model that was split, not one of its parts")
        return self.outer.get("attention_mask"), rules

    def _refuse_late_padding(self, cache: SplitCache) -> None:
        if any(layer.store is not None and layer.window is not None for layer in cache.parts):
            raise RequestError(
                "padding in a later call, or tokens that see each other, for a cache that has dropped the keys behind its windows: pass the "
                "attention_mask with the padding, or the images, from the first call on, or use_cache=False"
            )

    def counts(self, tokens: int) -> list[int] | None:
        """Tokens of each rank; ``None`` if all ranks compute all of them, since they are few."""
        size = self.group.size
        if tokens == 1 or tokens < size:
            return None
        return share_out(tokens, self.shares) if self.pace is None else self.pace.counts(tokens, self.attention)

    def execution_of(self, batch: int, counts: list[int] | None, gradients: bool) -> dict[str, Any]:
        """Options of :meth:`Group.attend` in passes over so many tokens of each rank."""
        if self._strategies is None or counts is None:
            return self.execution
        # Lengths up to a power of two have the same, whatever a rank has asked for before.
        return self._strategies.of(batch, self.counts(1 << (sum(counts) - 1).bit_length()) or counts, gradients)

    def _compare_with_one_rank(self, past: int, shape: tuple[int, int], began: float) -> None:
        if self.pace is not None and self._watch is not None and past == 0 and not torch.is_grad_enabled():
            # After the rows were gathered, the device has computed them.
            self._watch.saw(self.pace, shape[1], self.traits.attention, (time.perf_counter() - began) / shape[0])

    def _gather_output(self, output: Any, forward: Forward) -> None:
        """Puts the rows of all ranks into an output of the body."""
        first, end = self.rows(forward.tokens)
        # The head asks for the last rows only: those of this rank begin here.
        skip = min(max(forward.tokens - self.keep - first, 0), end - first) if self.keep else 0

        def everywhere(rows: torch.Tensor, what: str) -> torch.Tensor:
            if self.gather == "none" and not self.generating:
                return rows
            if forward.pooled is not None and forward.pooled[0] is rows:
                return forward.pooled[1]
            return gather(self.group, rows, f"{forward.label} {what}")

        for name, value in list(output.items()):
            if name == "last_hidden_state":
                output[name] = everywhere(value[:, skip:] if skip else value, name)
            elif name == "hidden_states":
                output[name] = tuple(everywhere(rows, f"hidden state {n}") for n, rows in enumerate(value))
            elif name not in (CACHE, "pooler_output") and value is not None:
                raise RequestError(f"the model's output {name} has the tokens of one rank: run this model on one rank")
