"""A small language model of bytes in plain PyTorch. A rank runs it on its own tokens; only attention sees those of the others."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, KV_HEADS, HEAD, INNER, LAYERS = 128, 4, 2, 32, 344, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x, turns, attend):
        heads = self.qkv(self.before(x)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        o = attend(turned(q, turns), turned(k, turns), v)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        gate, value = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.04)

    def forward(self, tokens, positions, attend):
        """
        :param tokens: of this rank, ``[batch, tokens]``; ``positions`` are their places in the whole sequence, ``[tokens]``.
        :param attend: attention over all tokens, of ``[batch, heads, tokens, dim]``.
        :returns: logits ``[batch, tokens, 256]``.
        """
        x, turns = self.embedding(tokens), angles(positions)
        for layer in self.layers:
            x = layer(x, turns, attend)
        return self.head(self.last(x))


def angles(positions):
    """Of rotary positions: they count in the whole sequence, not from the first token of a rank."""
    speeds = 10000.0 ** (-torch.arange(0, HEAD, 2).double() / HEAD)
    turns = positions[:, None].double() * speeds
    return turns.cos().float(), turns.sin().float()


def turned(x, turns):
    cos, sin = turns
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def alone(q, k, v):
    """PyTorch's own attention, in one process."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def renumber(model, seed):
    """Gives the axes of the hidden state, and those inside each feed-forward part, other numbers.

    The model computes the same; but each matrix product, norm and sum over parameters adds its terms in another order.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randperm(WIDTH, generator=generator)
    with torch.no_grad():
        for norm in [model.last, *(norm for layer in model.layers for norm in (layer.before, layer.between))]:
            norm.weight.copy_(norm.weight[hidden])
        for reader in [model.embedding, model.head, *(part for layer in model.layers for part in (layer.qkv, layer.up))]:
            reader.weight.copy_(reader.weight[:, hidden])
        for layer in model.layers:
            inner = torch.randperm(INNER, generator=generator)
            layer.out.weight.copy_(layer.out.weight[hidden])
            layer.down.weight.copy_(layer.down.weight[hidden][:, inner])
            layer.up.weight.copy_(layer.up.weight[torch.cat([inner, inner + INNER])])
    return model
