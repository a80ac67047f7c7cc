"""Trains one small language model on one, two and four ranks, and compares the loss curves.

    demos/training/run.sh                       # 400 steps, 18 minutes on two cores
    demos/training/run.sh --steps 20 --picture curves.png
"""

import argparse
import copy
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from model import Model, alone, renumber

import kyklos
import kyklos.torch

CONTEXT, BATCH, STEPS = 384, 2, 400
# The largest of the differences of a few runs is within such a factor of the largest of a few others.
FACTOR = 4.0
CONTROLS = 3


@dataclass(frozen=True)
class Way:
    """How the tokens of a training run are split."""

    name: str
    #: The tokens of the ranks in proportion.
    shares: tuple[int, ...]
    strategy: str
    mesh: str


WAYS = [
    Way("2 ranks, ring", (3, 7), "ring", "1x2"),
    Way("2 ranks, Ulysses", (7, 3), "ulysses", "2x1"),
    Way("4 ranks, ring", (4, 1, 3, 2), "ring", "1x4"),
    Way("4 ranks, Ulysses", (1, 3, 2, 4), "ulysses", "4x1"),
    Way("4 ranks, unified 2x2", (3, 2, 4, 1), "unified", "2x2"),
]


def documents(folder):
    """The bytes of all documents, in the order of their names."""
    root = Path(folder)
    other = {"target", "node_modules", ".venv", "results"}
    files = [path for path in root.rglob("*.md") if not other & set(path.relative_to(root).parts)]
    text = b"\n".join(path.read_bytes() for path in sorted(files))
    if len(text) < 16 * CONTEXT:
        raise SystemExit(f"{len(text)} bytes in the *.md of {root}: name the folder of the repository with --text")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(text, steps):
    """Tokens and targets of each step, ``[batch, context]``. A target is the next token, also at the last token of a rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        yield pieces[:, :-1], pieces[:, 1:]


def rows(shares, rank):
    """The tokens of a rank, in proportion."""
    cuts = [round(CONTEXT * sum(shares[:n]) / sum(shares)) for n in (rank, rank + 1)]
    return slice(*cuts)


def train(model, data, attend=alone, own=slice(0, CONTEXT), group=None, cut_targets=False):
    """This rank's part of the loss of each step. Of the sequence it has the tokens ``own``.

    :param cut_targets: a fault that is planted: a rank does not know the token behind its last one.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    # Up in the first 20 steps, then down to a tenth.
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 0.1 + 0.45 * (1 + math.cos(math.pi * step / len(data))))
    )
    positions = torch.arange(CONTEXT)[own]
    losses = []
    for tokens, targets in data:
        targets = targets[:, own]
        if cut_targets:
            targets = torch.cat([targets[:, :-1], torch.full((BATCH, 1), -100)], 1)
        logits = model(tokens[:, own], positions, attend)
        # A part of the mean over all tokens: the sum over the ranks is the loss.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * CONTEXT)
        optimizer.zero_grad()
        loss.backward()
        if group is not None:
            kyklos.torch.sum_gradients(model.parameters(), group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    return losses


def split(model, data, way, cut_targets=False):
    """Losses by step, and the model of each rank after the training."""
    models = [copy.deepcopy(model) for _ in way.shares]

    def rank(group):
        def attend(q, k, v):
            return kyklos.torch.attention(q, k, v, group, mask="causal", strategy=way.strategy, mesh=way.mesh)[0]

        own = rows(way.shares, group.rank)
        # Without the fault the targets of all tokens are known.
        cut = cut_targets and group.rank + 1 < group.size
        return train(models[group.rank], data, attend, own, group, cut)

    parts = kyklos.run_local(len(way.shares), rank, device="cpu")
    return [sum(step) for step in zip(*parts, strict=True)], models


def first_model():
    torch.manual_seed(0)
    return Model()


def differences(losses, right):
    """The largest difference up to each step."""
    largest, found = 0.0, []
    for ours, one in zip(losses, right, strict=True):
        largest = max(largest, abs(ours - one))
        found.append(largest)
    return found


def bounds(controls, right):
    """What rounding explains at each step: the runs of one rank with sums in other orders say how it grows.

    They may agree by chance, so each counts as no less than one rounding of the sum of all tokens' losses: near 4400 numbers of float32
    lie 4.9e-4 apart, which is 6e-7 of the mean. Each rank's part of the loss is rounded as well, by up to 2.4e-7.
    """
    tokens = BATCH * CONTEXT
    rounding = 2.0 ** (math.floor(math.log2(right[0] * tokens)) - 23) / tokens
    each = [differences(control, right) for control in controls]
    return [FACTOR * max(*step, rounding) + 1e-6 for step in zip(*each, strict=True)]


def equal_bytes(models):
    """Whether all ranks have the same weights."""
    first = list(models[0].parameters())
    return all(
        torch.equal(a, b) for other in models[1:] for a, b in zip(first, other.parameters(), strict=True)
    )


def compare(text, steps, ways, controls=CONTROLS, say=print):
    """Runs all trainings. Returns the curves by name, the bound by step, and the faults that it found."""
    data = list(batches(text, steps))
    begin = time.monotonic()

    def told(name, losses):
        say(f"{name:<24} {losses[0]:.3f} to {losses[-1]:.3f}, {time.monotonic() - begin:.0f} s", flush=True)
        return losses

    right = told("1 rank", train(first_model(), data))
    reordered = [
        told(f"1 rank, renumbered {seed}", train(renumber(first_model(), seed), data)) for seed in range(1, controls + 1)
    ]
    bound = bounds(reordered, right)
    curves, faults = {"1 rank": right}, []
    for way in ways:
        losses, models = split(first_model(), data, way)
        curves[way.name] = told(way.name, losses)
        late = [step + 1 for step, found in enumerate(differences(losses, right)) if found > bound[step]]
        if late:
            faults.append(f"{way.name}: from step {late[0]} on the loss differs by more than rounding explains")
        if not equal_bytes(models):
            faults.append(f"{way.name}: the ranks have different weights")
    planted, _ = split(first_model(), data, ways[0], cut_targets=True)
    if differences(planted, right)[0] <= 10 * bound[0]:
        faults.append("the comparison does not see targets that are cut off at the borders of the ranks")
    curves["targets cut off"] = told("targets cut off", planted)
    return curves, reordered, bound, faults


def table(curves, reordered, bound, steps):
    """The largest differences to one rank up to some steps."""
    right = curves["1 rank"]
    at = sorted({1, *(step for step in (2, 5, 10, 20, 50, 100, 200, 500, 1000) if step < steps), steps})
    control = [max(step) for step in zip(*(differences(one, right) for one in reordered), strict=True)]
    lines = {"1 rank, renumbered": control}
    lines |= {name: differences(losses, right) for name, losses in curves.items() if name != "1 rank"}
    lines["allowed"] = bound
    yield f"{'largest difference up to step':<30}" + "".join(f"{step:>9}" for step in at)
    yield f"{'(loss of 1 rank)':<30}" + "".join(f"{right[step - 1]:>9.3f}" for step in at)
    for name, values in lines.items():
        yield f"{name:<30}" + "".join(f"{values[step - 1]:>9.1e}" for step in at)


def picture(path, curves, reordered, bound):
    """The curves, and their differences to one rank."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    right = curves["1 rank"]
    steps = range(1, len(right) + 1)
    figure, (left, below) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, losses in curves.items():
        if name != "targets cut off":
            # One rank is black, so that the others have one colour on both sides.
            left.plot(steps, losses, label=name, linewidth=1, **({"color": "black"} if name == "1 rank" else {}))
            if name != "1 rank":
                below.plot(steps, [max(found, 1e-8) for found in differences(losses, right)], label=name, linewidth=1)
    for number, one in enumerate(reordered):
        label = "1 rank, renumbered" if number == 0 else None
        below.plot(steps, [max(found, 1e-8) for found in differences(one, right)], ":", color="grey", label=label)
    below.plot(steps, bound, "--", color="black", linewidth=1, label="allowed")
    cut = differences(curves["targets cut off"], right)
    below.plot(steps, cut, "-.", color="red", linewidth=1, label="fault: targets cut off")
    below.set(yscale="log", xlabel="step", title="largest difference to 1 rank so far")
    left.set(xlabel="step", title="loss, nats for a byte (the curves lie on each other)")
    left.legend(fontsize=8)
    below.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default=Path(__file__).parents[2], help="folder whose *.md are read")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--picture", metavar="FILE", help="draws the curves; needs matplotlib")
    options = parser.parse_args()
    # Ranks are threads of this process, each with one thread of PyTorch.
    torch.set_num_threads(1)
    text = documents(options.text)
    weights = sum(parameter.numel() for parameter in first_model().parameters())
    print(f"{weights} weights, {len(text)} bytes of text, steps of {BATCH} x {CONTEXT} bytes; loss in nats for a byte")
    curves, reordered, bound, faults = compare(text, options.steps, WAYS)
    print("\n".join(["", *table(curves, reordered, bound, options.steps), ""]))
    if options.picture:
        picture(options.picture, curves, reordered, bound)
    for fault in faults:
        print(f"failed: {fault}")
    if faults:
        sys.exit(1)
    print("trained  all curves agree with that of one rank; after the last step all ranks of a run have the same weights")


if __name__ == "__main__":
    main()
