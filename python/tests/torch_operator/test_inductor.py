"""Code that inductor compiles with a C++ compiler, on ranks of unlike lengths that are processes."""

import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F

import kyklos
import kyklos.torch

# The tokens of each rank, in turns: the second length of a rank compiles the graph once more, for any length.
LENGTHS = [(7, 33), (20, 5), (11, 18), (1, 40)]


class Block(torch.nn.Module):
    """Attention and a feed-forward part; ``group`` is ``None`` in one process."""

    def __init__(self):
        super().__init__()
        self.before, self.after = torch.nn.LayerNorm(32), torch.nn.LayerNorm(32)
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.group = None

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.group is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            o, _ = kyklos.torch.attention(q, k, v, self.group, mask="causal")
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block()).eval()


def text(tokens):
    return torch.randn(2, tokens, 32, generator=torch.Generator().manual_seed(tokens))


def rank_of_two(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    blocks = model()
    with kyklos.Group.from_torch(device="cpu", join_deadline_s=120, deadline_s=300) as group, torch.no_grad():
        for block in blocks:
            block.group = group
        torch._dynamo.config.automatic_dynamic_shapes = True
        compiled = torch.compile(blocks, fullgraph=True, backend="inductor")
        outputs = []
        for lengths in LENGTHS:
            first = sum(lengths[:rank])
            outputs.append(compiled(text(sum(lengths))[:, first : first + lengths[rank]]))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.save((outputs, graphs), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")), reason="no C++ compiler"
)
def test_fullgraph_on_ranks_of_unlike_lengths(tmp_path):
    context = torch.multiprocessing.spawn(rank_of_two, (str(tmp_path),), nprocs=2, join=False)
    try:
        # join() returns when one of them has ended.
        assert context.join(timeout=400) or context.join(timeout=60)
    finally:
        for process in context.processes:
            process.kill()
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    with torch.no_grad():
        for turn, lengths in enumerate(LENGTHS):
            want = model()(text(sum(lengths)))
            got = torch.cat([outputs[turn] for outputs, _ in ranks], 1)
            assert (got - want).abs().max() < 4e-6
    # One for the first length, one for all others, and one more where a rank has a single token.
    assert all(1 <= graphs <= 3 for _, graphs in ranks)
