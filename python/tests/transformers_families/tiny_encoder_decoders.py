"""Tiny random encoder-decoders, and inputs for them."""

import torch
from tiny_models import VOCABULARY, build_class

_T5 = {
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    # Far positions share buckets in texts of some tokens already.
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 20,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": None,
    "decoder_start_token_id": 0,
}
_BART = {
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 128,
    "init_std": 0.2,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
}
_WHISPER = {
    **_BART,
    "num_mel_bins": 8,
    "max_source_positions": 26,
    "max_target_positions": 64,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}

#: Classes of models with a head, and settings.
ENCODER_DECODERS = {
    "T5": _T5,
    "T5 gated": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "MT5": {**_T5, "feed_forward_proj": "gated-gelu"},
    "UMT5": _T5,
    "Bart": _BART,
    "MBart": _BART,
    "Marian": {**_BART, "decoder_vocab_size": VOCABULARY},
    "Pegasus": _BART,
    "Blenderbot": _BART,
    "BlenderbotSmall": _BART,
    "PLBart": _BART,
    "M2M100": _BART,
    "Whisper": _WHISPER,
}
_HEADS = {"Marian": "MarianMTModel"}


def encoder_decoder(name, **changes):
    kind = name.split()[0]
    return _wide(build_class(_HEADS.get(kind, f"{kind}ForConditionalGeneration"), f"{kind}Config", {**ENCODER_DECODERS[name], **changes}))


def of_class(cls, config, **changes):
    """A model of another class than those with a language head."""
    return _wide(build_class(cls, config, {**ENCODER_DECODERS[config.removesuffix("Config")], **changes}))


def _wide(model):
    """Biases of positions and of layers that matter: those of a new model are small, or zero."""
    make = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.copy_(2 * torch.randn(parameter.shape, generator=make))
            elif name.endswith("bias") and "norm" not in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=make))
            elif name.endswith("q.weight"):
                # T5 does not scale its logits, and makes small queries.
                parameter.mul_(3)
    return model


def source(name, tokens=23):
    """What the encoder gets: two texts of which one is padded on the left and the other on the right, or two sounds. For an encoder alone the
    padding is on the right, as in pipelines of diffusers."""
    make = torch.Generator().manual_seed(1)
    if name.startswith("Whisper"):
        return {"input_features": torch.randn(2, 8, 52, generator=make)}
    ids = torch.randint(3, VOCABULARY, (2, tokens), generator=make)
    mask = torch.ones_like(ids)
    mask[0, slice(-7, None) if name.endswith("EncoderModel") else slice(3)] = 0
    mask[1, -4:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def targets(tokens=17):
    """Labels, of which some count for nothing."""
    labels = torch.randint(3, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(2))
    labels[0, -3:] = -100
    return labels
