"""Cosmos and its relatives."""

from __future__ import annotations

from diffusers.models._modeling_parallel import ContextParallelOutput as Output

from .._plan import Known, SplitPlan
from .parts import OUT, rope, tokens

# One time for all tokens, [batch, dim], or one for each, [batch, tokens, dim].
_TIMES = {"embedded_timestep": tokens(3), "temb": tokens(3)}
_ROWS = tokens(2, 0)

KNOWN = {
    "CosmosTransformer3DModel": Known(
        SplitPlan(
            {
                "rope": rope(2, 0),
                "transformer_blocks.0": {"hidden_states": tokens(3)},
                "transformer_blocks.*": {**_TIMES, "extra_pos_emb": tokens(3), "controlnet_residual": tokens(3)},
                "norm_out": _TIMES,
                **OUT,
            },
            attention=("transformer_blocks.*.attn1",),
            whole=frozenset(_TIMES),
        ),
        frozenset({"CosmosAttnProcessor2_0"}),
    ),
    # The text, which attends to itself alone, is whole on each rank; its keys count once in the attention of the other tokens.
    "Cosmos3OmniTransformer": Known(
        SplitPlan(
            {
                "layers.0": {"gen_seq": _ROWS},
                "layers.*": {"rotary_emb": (None, None, _ROWS, _ROWS)},
                "norm_moe_gen": Output(gather_dim=0, expected_dims=2),
            },
            attention=("layers.*.self_attn",),
            common_keys=True,
        ),
        frozenset({"Cosmos3AttnProcessor"}),
    ),
}
