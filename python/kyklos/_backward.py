"""Gradients of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _kyklos
from ._arrays import like
from ._options import CallOptions, Unpack
from ._sequence import in_sequence


@dataclass(frozen=True)
class Gradients:
    """The gradients of one rank's arrays, of :meth:`Group.backward`."""

    #: Of q, k and v, like these: over the queries of all ranks.
    dq: Any
    dk: Any
    dv: Any
    #: This rank's part of the gradients of the sinks, one for each query head: the gradient is the sum over all ranks.
    d_sinks_part: list[float]
    #: With ``bias_gradient``, of the bias in float32: of ``bias`` the rows of this rank's queries, in its shape; of ``key_bias`` this
    #: rank's part, the gradient is the sum over all ranks. Otherwise ``None``.
    d_bias: Any = None


class Differentiable:
    """What a group has for them."""

    _core: _kyklos.Group

    if TYPE_CHECKING:

        def _call(self, options: CallOptions, *arrays: Any) -> _kyklos.Call: ...

    @in_sequence
    def backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        d_o: Any,
        d_lse: Any = None,
        **options: Unpack[CallOptions],
    ) -> Gradients:
        """The gradients of a scalar ``L`` with respect to the ``q``, ``k`` and ``v`` of :meth:`Group.attend`.

        All ranks make this call together. With PyTorch use :func:`kyklos.torch.attention`, whose ``backward()`` does.

        :param o: what ``attend`` has returned.
        :param lse: likewise, best with ``lse_pair=True``. Of the rounded one the weights of a row have an error of 2⁻²⁵ of it: much where
            logits, or numbers in the place of minus infinity, are huge.
        :param d_o: ``∂L/∂o``, of the shape and the type of ``o``.
        :param d_lse: ``∂L/∂lse``, float32 ``[batch, tokens, heads]`` (``"bhsd"``: ``[batch, heads, tokens]``); without it ``L`` does not depend on ``lse``.
        :param options: those of the call of ``attend``. A strategy without a backward pass is replaced by the default of its
            mesh. With ``bias_gradient=True`` the numbers in ``bias`` or ``key_bias`` get a gradient, too. Of
            ``replicated`` keys every rank gets the whole gradient, in equal bytes: if gradients of parameters are summed over the
            ranks, use these rows on one rank only. Refused:
            ``same_queries``, ``results``, ``fixed_order`` and ``wire="int8"``.
        :raises RequestError: as :meth:`Group.attend`; also on a browser tab, which has no kernels for gradients.
        """
        call = self._call(options, q, k, v, o, lse, d_o, d_lse)
        dq, dk, dv, d_sinks_part, d_bias = self._core.backward(call, [q, k, v, o, lse, d_o], d_lse)
        of_bias = None if d_bias is None else like(q, d_bias)
        if of_bias is not None and options.get("key_bias") is not None:
            of_bias = of_bias.reshape(options["key_bias"].shape)
        return Gradients(like(q, dq), like(k, dk), like(v, dv), d_sinks_part, of_bias)
