"""A model whose encoder and decoder are split.

An encoder gives every rank the states of all tokens, so that cross-attention needs no other rank. A decoder is split where it makes no cache.
With a cache, as in the steps of ``generate()``, each rank computes all of its tokens, with the caches of transformers.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from ..._errors import DeviceError, GroupError, RequestError
from ..._group import Group
from ..._models.agreement import Passes
from ..._models.execution import checked_shares, drops, share_out
from ..._models.projections import compare_rows
from ..._models.telling import told
from ..._rows import gather
from .. import _checks as checks
from .. import _hooks as hooks
from .. import _inputs as given_inputs
from .._attention import NAME, current, entered
from .._cache import CACHE, CACHE_NAMES, given_cache
from . import trial
from .passes import StackPass, bias_of_own_rows, own_states

_KNOWN = {
    *given_inputs.KNOWN - {"position_ids", "token_type_ids"},
    *("input_features", "encoder_hidden_states", "encoder_attention_mask", "output_hidden_states", "output_attentions"),
}


def stacks_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The encoder of a model and, if it has one, the decoder, where they are such stacks; otherwise none."""
    if not isinstance(model, PreTrainedModel):
        return []
    if model.config.is_encoder_decoder:
        encoder, decoder = model.get_encoder(), model.get_decoder()
        if encoder is not decoder and encoder is not model and decoder is not model:
            return [encoder, decoder]
    alone = checks.body_of(model)
    if "position_ids" in inspect.signature(alone.forward).parameters or alone is not model.get_encoder():
        return []
    return [alone] if model.config.is_encoder_decoder or alone is not model else []


class SplitStacks:
    """A model whose encoder, and decoder if it has one, compute the tokens of this rank. It stands for a ``SplitModel``."""

    def __init__(
        self,
        model: PreTrainedModel,
        stacks: Sequence[PreTrainedModel],
        group: Group,
        execution: dict[str, Any],
        shares: str | Sequence[float] | None,
        gather: str,
    ) -> None:
        self.model, self.group, self.execution, self.gather = model, group, execution, gather
        self.base = stacks[0]
        self.shares = checked_shares(shares, group.size)
        if isinstance(shares, str):
            raise RequestError(f'shares="auto" of {type(model).__name__}: an encoder-decoder takes a number for each rank')
        if gather not in ("auto", "none"):
            raise RequestError(f'gather is {gather!r}: use "auto" or "none"')
        if gather == "none" and len(stacks) > 1:
            raise RequestError(f'gather="none" of {type(model).__name__}: the decoder needs all tokens of the encoder; use gather="auto"')
        self.names = {module: name for name, module in model.named_modules()}
        #: As those of a ``SplitModel``.
        self.keep = 0
        self.labels: torch.Tensor | None = None
        self.outer: dict[str, Any] | None = None
        self.generating = False
        self.passes = Passes(group)
        self.stacks = [Stack(self, stack, of_decoder=number > 0) for number, stack in enumerate(stacks)]

    def install(self, check: bool) -> None:
        """Replaces the forward passes of the stacks; with ``check`` compares them with those that were there."""
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            self.passes.check_weights(self.model)
            expected = [stack.expected() if check else None for stack in self.stacks]
            for stack in self.stacks:
                stack.install()
            for stack, whole in zip(self.stacks, expected, strict=True):
                if whole is not None:
                    self._check(stack, *whole)
        except BaseException:
            self.remove()
            raise
        finally:
            for module, mode in training.items():
                module.training = mode

    def _check(self, stack: Stack, inputs: dict[str, Any], whole: torch.Tensor) -> None:
        kept = self.shares, self.gather, self.execution
        # Rounded keys and values are no fault of the model.
        self.shares, self.gather, self.execution = [1.0] * self.group.size, "auto", {**self.execution, "wire": None}
        try:
            with torch.no_grad():
                split = stack.stack(**inputs, return_dict=True).last_hidden_state
        finally:
            self.shares, self.gather, self.execution = kept
        equal, error = checks.compare(split, whole, trial.visible(inputs, whole))
        if not equal:
            raise RequestError(
                f"{type(self.model).__name__} does not compute the same when it is split: the largest error of a trial text in "
                f"{type(stack.stack).__name__} is {error}, so its layers look at the tokens of one rank only; run it on one rank"
            )

    def remove(self) -> None:
        """Restores the model."""
        for stack in reversed(self.stacks):
            stack.remove()

    def counts(self, tokens: int) -> list[int] | None:
        """Tokens of each rank; ``None`` if all ranks compute all of them, since they are few."""
        return share_out(tokens, self.shares) if tokens > 1 and tokens >= self.group.size else None

    def rows(self, tokens: int) -> tuple[int, int]:
        """The rows of this rank, as a half-open range, of a pass over ``tokens`` tokens."""
        counts = self.counts(tokens) or [0] * self.group.rank + [tokens]
        first = sum(counts[: self.group.rank])
        return first, first + counts[self.group.rank]

    def cache(self, rollback: int = 0) -> Any:
        raise RequestError(f"a cache over ranks for {type(self.model).__name__}: its decoder takes the EncoderDecoderCache of transformers")


class Stack:
    """An encoder or a decoder of a split model."""

    def __init__(self, split: SplitStacks, stack: PreTrainedModel, of_decoder: bool) -> None:
        self.split, self.stack, self.of_decoder = split, stack, of_decoder
        trial.refuse_unsplittable(split.model, stack)
        self._implementation = stack.config._attn_implementation
        self._run: Any = stack.forward
        self._undo: hooks.Undo = []

    def expected(self) -> tuple[dict[str, Any], torch.Tensor]:
        """A trial's inputs, and what the stack as it is makes of them."""
        inputs = trial.inputs_of(self.stack, self.split.group.size, self.of_decoder)
        return inputs, trial.run(self.stack, self._run, inputs)

    def install(self) -> None:
        stack = self.stack
        stack.set_attn_implementation(NAME)
        if stack.config._attn_implementation != NAME:
            raise RequestError(f"{type(stack).__name__} does not take another attention function: run it on one rank")
        self.traits = trial.traits_of(self._run, stack, self.split.group, self.split.names, self.of_decoder)
        self._undo.append(self.traits.first.register_forward_pre_hook(own_states, with_kwargs=True).remove)
        for module in stack.modules():
            compute: Any = getattr(module, "compute_bias", None)
            if compute is not None:
                hooks.replace(module, "compute_bias", functools.partial(bias_of_own_rows, compute), self._undo)
        names = list(inspect.signature(self._run).parameters)
        forward = functools.partial(Stack._forward, self, names)
        hooks.replace(stack, "forward", functools.update_wrapper(forward, self._run), self._undo)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
        if self.stack.config._attn_implementation != self._implementation:
            self.stack.set_attn_implementation(self._implementation)

    def _forward(self, names: list[str], /, *args: Any, **kwargs: Any) -> Any:
        """``forward`` of the stack, whose arguments have these ``names``, for the inputs of all ranks."""
        if current() is not None:
            return self._run(*args, **kwargs)
        with told(self.split.group):
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            return self._split_pass({name: value for name, value in given.items() if value is not None})

    def _split_pass(self, inputs: dict[str, Any]) -> Any:
        split = self.split
        self._refuse(inputs)
        cached = self._uses_cache(inputs)
        cache = given_cache(inputs)
        past = 0 if cache is None else int(cache.get_seq_length())
        running = StackPass(
            split.group,
            split.names,
            label="a step of generate()",
            counts=None,
            tokens=0,
            execution=split.execution,
            deal=_whole if cached else split.counts,
            cross=self.traits.cross,
            visible=inputs.get("attention_mask") if self.traits.masked else None,
            cross_visible=inputs.get("encoder_attention_mask"),
            past=past,
            # Rank 0 has chosen the tokens.
            compared=not (split.generating and past),
        )
        if running.compared:
            running.label = self._label(inputs, cached)
        if self.of_decoder:
            inputs = {**inputs, "use_cache": cached}
        try:
            with entered(running), hooks.recomputed(self.stack, running):
                output = self._run(**{**inputs, "return_dict": True})
                if running.attended != self.traits.calls:
                    raise RequestError(
                        f"{len(running.attended)} attention calls in a pass over {type(self.stack).__name__}, which had {len(self.traits.calls)}: do "
                        "not change the model's layers after parallelize()"
                    )
                if running.counts is not None:
                    self._gather(output, running)
        except (RequestError, GroupError, DeviceError):
            raise
        except BaseException as error:
            if running.counts is not None:
                split.group.abort(f"{type(error).__name__} in the model: {error}")
                error.told = True  # type: ignore[attr-defined]
            raise
        return output if inputs.get("return_dict", self.stack.config.return_dict) else output.to_tuple()

    def _label(self, inputs: dict[str, Any], cached: bool) -> str:
        """Beginning of the labels of the pass, after the ranks have compared what they have of its inputs."""
        split = self.split
        learns = torch.is_grad_enabled() and self is split.stacks[-1]
        number = split.passes.next(split.model, learns)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        whose = zlib.crc32(f"{split.shares} {split.gather} {cached} {sorted(tensors)}".encode())
        masks = {name: value.to(torch.bool) for name, value in tensors.items() if name.endswith("attention_mask")}
        digest = given_inputs.digest(*({**tensors, **masks}[name] for name in sorted(tensors)), split.labels)
        label = f"{split.passes.model}, pass {number}, shares {whose:08x}, inputs {digest},"
        numbers = {name: value for name, value in tensors.items() if name not in masks}
        compare_rows(split.group, {**numbers, "labels": split.labels}, label)
        return label

    def _refuse(self, inputs: dict[str, Any]) -> None:
        """Refuses inputs that cannot be split or would have no effect."""
        if inputs.get("output_attentions") or getattr(self.stack.config, "output_attentions", False):
            raise RequestError("output_attentions of a split model: the weights are never made; leave it out")
        known = _KNOWN | (inspect.signature(self._run).parameters.keys() & {"position_ids"})
        for name, value in inputs.items():
            if name not in known and isinstance(value, (torch.Tensor, dict)):
                raise RequestError(f"a split model does not know how to split the input {name}: leave it out, or use one rank")
        if drops(self.split.model):
            raise RequestError("dropout in a split model would differ between ranks: call model.eval()")
        cache = given_cache(inputs)
        parts = (cache.self_attention_cache, cache.cross_attention_cache) if isinstance(cache, EncoderDecoderCache) else (cache,)
        if cache is not None and not all(type(part) is DynamicCache for part in parts):
            raise RequestError(
                f"a cache of {', '.join(type(part).__name__ for part in parts)} for {type(self.split.model).__name__}, which is split: pass an "
                "EncoderDecoderCache of two DynamicCache"
            )

    def _uses_cache(self, inputs: dict[str, Any]) -> bool:
        if not self.of_decoder:
            return False
        use = inputs.get("use_cache")
        if use is None and given_cache(inputs) is None:
            # Training does not use the cache that a model makes by default.
            trains = torch.is_grad_enabled() and (self.stack.training or self.split.labels is not None)
            return bool(self.stack.config.use_cache) and not trains
        return given_cache(inputs) is not None or bool(use)

    def _gather(self, output: Any, running: StackPass) -> None:
        """Puts the rows of all ranks into an output of the stack."""

        def everywhere(rows: torch.Tensor, what: str) -> torch.Tensor:
            return rows if self.split.gather == "none" else gather(self.split.group, rows, f"{running.label} {what}")

        for name, value in list(output.items()):
            if name == "last_hidden_state":
                output[name] = everywhere(value, name)
            elif name == "hidden_states":
                output[name] = tuple(everywhere(rows, f"hidden state {n}") for n, rows in enumerate(value))
            elif name not in (*CACHE_NAMES, CACHE) and value is not None:
                raise RequestError(f"the model's output {name} has the tokens of one rank: run this model on one rank")


def _whole(_: int) -> None:
    """All ranks compute all tokens."""
