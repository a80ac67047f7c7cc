"""Pictures of one small pipeline on one rank and on several, by every strategy and wire, with their differences.

    python pictures.py FOLDER                                # trains for 5 to 12 minutes, then draws for 10, on two shared cores
    python pictures.py FOLDER --weights WEIGHTS              # with what an earlier run has trained

A transformer of Stable Diffusion 3 learns prompts like "a red ring on blue" by pictures that are drawn here; nothing is downloaded. Then it makes
the same pictures, from the same prompts and the same seed, in one process and in groups of processes. FOLDER gets pictures.png (all pictures and
their differences from those of one process), table.md and figures.json.
"""

import argparse
import copy
import gc
import json
import math
import re
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image, ImageDraw, ImageFont

import kyklos
import kyklos.diffusers

PIXELS = 32
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 170, 70),
    "blue": (40, 80, 220),
    "yellow": (245, 215, 50),
    "purple": (150, 60, 190),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
WORDS, LENGTH = ("a", "on", *COLOURS, *SHAPES), 5
PROMPTS = ("a red circle on blue", "a yellow triangle on purple", "a white cross on green", "a blue ring on yellow")

#: Strategies of a ring that send keys and values, which a wire format rounds; and those that send queries.
KEYS = ("ring", "bidirectional", "pipelined", "two-way", "line", "gather")
QUERIES = ("pass-q", "tree")
WIRES = ("same", "f16", "int8")


def ways(size):
    """``(strategy, mesh, wire)`` for groups of ``size`` ranks."""
    found = [(strategy, f"1x{size}", wire) for strategy in KEYS for wire in WIRES]
    found += [(strategy, f"1x{size}", "same") for strategy in QUERIES]
    found += [(strategy, f"{size}x1", "same") for strategy in ("ulysses", "chunked")]
    if size % 2 == 0 and size > 2:
        mesh = f"2x{size // 2}"
        found = [(strategy, mesh, wire) for strategy in ("unified", "chunked", "relay") for wire in WIRES]
    return found


def encode(prompt):
    """A vector ``[words, ...]`` for each word of a prompt and its place, and one for the whole prompt."""
    words = F.one_hot(torch.tensor([WORDS.index(word) for word in prompt.split()]), len(WORDS)).float()
    return torch.cat([words, torch.eye(LENGTH)], 1), words.flatten()


def encoded(prompts):
    """Embeddings of prompts, and their pooled ones."""
    return [torch.stack(parts) for parts in zip(*map(encode, prompts), strict=True)]


def drawn(prompt, generator):
    """A picture of a prompt ``[3, PIXELS, PIXELS]`` from -1 to 1, at a random place and of a random size."""
    _, front, shape, _, back = prompt.split()
    at = (torch.arange(PIXELS) + 0.5) / PIXELS * 2 - 1
    size, *shift = torch.rand(3, generator=generator).tolist()
    r = 0.68 + 0.08 * size
    x, y = (at[axis] - 0.1 * (by - 0.5) for axis, by in zip(((None, slice(None)), (slice(None), None)), shift, strict=True))
    radius = (x * x + y * y).sqrt()
    # Distances from the edge, negative inside.
    edge = {
        "circle": radius - r,
        "ring": (radius - 0.75 * r).abs() - 0.25 * r,
        "square": torch.maximum(x.abs(), y.abs()) - 0.85 * r,
        "triangle": torch.maximum(y - 0.7 * r, 0.87 * x.abs() - 0.5 * y - 0.5 * r),
        "cross": torch.minimum(
            torch.maximum(x.abs() - r, y.abs() - 0.3 * r), torch.maximum(x.abs() - 0.3 * r, y.abs() - r)
        ),
    }[shape]
    cover = (0.5 - edge * PIXELS / 2).clamp(0, 1)
    front, back = (torch.tensor(COLOURS[colour])[:, None, None] / 127.5 - 1 for colour in (front, back))
    return cover * front + (1 - cover) * back


def train(steps, batch=8):
    """A transformer that has learned to take noise from pictures."""
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=PIXELS,
        patch_size=2,
        in_channels=3,
        out_channels=3,
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=24,
        joint_attention_dim=len(WORDS) + LENGTH,
        caption_projection_dim=96,
        pooled_projection_dim=len(WORDS) * LENGTH,
        pos_embed_max_size=PIXELS // 2,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    # Up in the first 30 steps, then down to a fiftieth.
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 30, 0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
    )
    pairs = [(front, back) for front in COLOURS for back in COLOURS if front != back]
    generator, began = torch.Generator().manual_seed(0), time.monotonic()
    for step in range(1, steps + 1):
        numbers = torch.randint(len(pairs) * len(SHAPES), (batch,), generator=generator).tolist()
        prompts = [
            f"a {front} {SHAPES[number % len(SHAPES)]} on {back}"
            for number in numbers
            for front, back in [pairs[number // len(SHAPES)]]
        ]
        pictures = torch.stack([drawn(prompt, generator) for prompt in prompts])
        noise = torch.randn(pictures.shape, generator=generator)
        sigma = torch.sigmoid(torch.randn(batch, 1, 1, 1, generator=generator) + 1)
        noisy = (1 - sigma) * pictures + sigma * noise
        flow = model(noisy, *encoded(prompts), 1000 * sigma.flatten(), return_dict=False)[0]
        loss = F.mse_loss(flow, noise - pictures)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step} of {steps}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return model.eval()


def make(transformer, steps):
    """The pictures ``[prompts, height, width, 3]`` from 0 to 255, not rounded, and the median of the seconds of a step."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    pipe = StableDiffusion3Pipeline(transformer=transformer, scheduler=scheduler, **dict.fromkeys(parts))
    pipe.set_progress_bar_config(disable=True)
    texts, pooled = encoded(PROMPTS)
    noise = torch.randn(len(PROMPTS), 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(1))
    times = [time.perf_counter()]

    def ended(pipe, step, timestep, kept):
        times.append(time.perf_counter())
        return kept

    latents = pipe(
        prompt_embeds=texts.to(transformer.dtype),
        pooled_prompt_embeds=pooled.to(transformer.dtype),
        latents=noise.to(transformer.dtype),
        # Without an autoencoder the pipeline takes one that shrinks pictures by 8.
        height=8 * PIXELS,
        width=8 * PIXELS,
        guidance_scale=1.0,
        num_inference_steps=steps,
        output_type="latent",
        callback_on_step_end=ended,
    ).images
    seconds = statistics.median(after - before for before, after in zip(times, times[1:], strict=False))
    return ((latents.float() + 1) * 127.5).clamp(0, 255).permute(0, 2, 3, 1), seconds


def cut_off(transformer, steps, size):
    """The pictures of a fault: each rank attends to its own tokens only."""
    attend = F.scaled_dot_product_attention
    # The tokens of the picture, then those of the text, are dealt to the ranks.
    counts = ((PIXELS // 2) ** 2, LENGTH)
    owner = torch.cat([torch.arange(count) * size // count for count in counts])
    F.scaled_dot_product_attention = lambda *tensors, **_: attend(*tensors, attn_mask=owner[:, None] == owner)
    try:
        return make(transformer, steps)[0]
    finally:
        F.scaled_dot_product_attention = attend


def peak_mib(reset=False):
    """The most memory of this process since the last reset. Only Linux tells."""
    try:
        if reset:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
        return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
    except OSError:
        return math.nan


def rank_of(rank, size, folder, steps):
    """All ways of a group of ``size`` processes, on one of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    transformer = SD3Transformer2DModel.from_pretrained(f"{folder}/weights").eval()
    found = []
    with kyklos.Group.from_torch(device="cpu", join_deadline_s=120, deadline_s=120) as group:
        for strategy, mesh, wire in ways(size):
            calls = []
            attended = [
                block.attn.register_forward_hook(lambda *_, calls=calls: calls.append(group.report))
                for block in transformer.transformer_blocks
            ]
            peak_mib(reset=True)
            with kyklos.diffusers.parallelize(transformer, group, mesh=mesh, strategy=strategy, wire=wire):
                # After the hooks of the split, the last call of the group is that of attention.
                pictures, seconds = make(transformer, steps)
            for hook in attended:
                hook.remove()
            found.append((pictures, seconds, calls, peak_mib()))
    torch.save(found, f"{folder}/{size}-{rank}.pt")
    dist.destroy_process_group()


def compare(folder, sizes, transformer, steps):
    """The pictures of one process, and for each way its pictures and figures: ``{title: [(strategy, wire, pictures, figures)]}``."""
    alone, seconds = make(transformer, steps)
    found = {
        "one process": [
            ("float32", "", alone, {"step_ms": 1000 * seconds}),
            ("float64", "", make(copy.deepcopy(transformer).double(), steps)[0], {}),
        ]
    }
    for size in sizes:
        print(f"{size} ranks", flush=True)
        torch.multiprocessing.spawn(rank_of, (size, folder, steps), nprocs=size)
        ranks = [torch.load(f"{folder}/{size}-{rank}.pt") for rank in range(size)]
        rows = []
        for (strategy, mesh, wire), of_ranks in zip(ways(size), zip(*ranks, strict=True), strict=True):
            pictures, seconds, calls, process_mib = zip(*of_ranks, strict=True)
            figures = {
                "mesh": mesh,
                "step_ms": 1000 * max(seconds),
                "attention_kib": max(call["peak_bytes"] for of_rank in calls for call in of_rank) / 1024,
                "process_mib": max(process_mib),
                "sent_kib": max(sum(call["bytes_sent"] for call in of_rank) for of_rank in calls) / 1024 / steps,
            }
            # The pictures of the rank that is furthest off.
            rows.append((strategy, wire, max(pictures, key=lambda one: (one - alone).abs().max()), figures))
        rows.append(("no exchange", "a fault", cut_off(transformer, steps, size), {}))
        found[f"{size} ranks"] = rows
    for rows in found.values():
        for *_, pictures, figures in rows:
            difference = (pictures - alone).abs()
            figures["largest"] = difference.max().item()
            figures["of_most_pixels"] = difference.amax(-1).flatten().quantile(0.99).item()
            figures["bytes_changed"] = int((pictures.round() != alone.round()).sum())
    return alone, found


def factors(found):
    """For each wire the power of ten by which its differences are multiplied, so that all but a few are in the range of a screen."""
    most = {}
    for rows in found.values():
        for _, wire, _, figures in rows:
            most[wire] = max(most.get(wire, 0.0), figures["of_most_pixels"])
    most["same"] = most[""] = max(most.get("same", 0.0), most[""])
    return {wire: 10 ** max(0, round(math.log10(255 / one))) if one else 1 for wire, one in most.items()}


def sheet(alone, found, shown=3, zoom=2, space=4, left=150, top=24):
    """All pictures, and right of them their differences: one block for each number of ranks, two blocks beside each other."""
    tile, times = zoom * PIXELS, factors(found)
    block = 2 * shown * (tile + space) + 3 * space
    titles = list(found)
    lines = [titles[:1], *(titles[first : first + 2] for first in range(1, len(titles), 2))]
    height = sum(top + max(len(found[title]) for title in line) * (tile + space) for line in lines) + space
    picture = Image.new("RGB", (2 * (left + block), height), "white")
    pen, font, small = ImageDraw.Draw(picture), ImageFont.load_default(15), ImageFont.load_default(12)

    def put(array, x, y):
        pixels = Image.fromarray(array.clamp(0, 255).round().byte().numpy())
        picture.paste(pixels.resize((tile, tile), Image.Resampling.NEAREST), (x, y))

    y = 0
    for line in lines:
        for column, title in enumerate(line):
            begin = column * (left + block)
            pen.text((begin + 8, y + 4), title, "black", font)
            pen.text((begin + left, y + 6), "pictures", "black", small)
            pen.text((begin + left + block // 2, y + 6), "differences from one process", "black", small)
            for number, (name, wire, pictures, _) in enumerate(found[title]):
                at = y + top + number * (tile + space)
                pen.text((begin + 8, at + 6), name, "black", font)
                pen.text((begin + 8, at + 25), f"wire {wire}" if wire in WIRES else wire, "black", small)
                pen.text((begin + 8, at + 42), f"differences x {times[wire]:,}", "dimgray", small)
                for index in range(shown):
                    x = begin + left + index * (tile + space)
                    put(pictures[index], x, at)
                    difference = (pictures[index] - alone[index]).abs().amax(-1, keepdim=True).expand(-1, -1, 3)
                    # In 16 steps of grey, which leaves the file small.
                    put((difference * times[wire] / 17).round() * 17, x + block // 2, at)
        y += top + max(len(found[title]) for title in line) * (tile + space)
    return picture.quantize(96, dither=Image.Dither.NONE)


def table(found):
    """The lines of a Markdown table."""
    columns = ("largest difference, of 255", "bytes that differ", "a step", "memory of attention", "memory of a process", "sent in a step")
    yield f"| ranks | strategy | mesh | wire | {' | '.join(columns)} |"
    yield "|---|---|---|---|--:|--:|--:|--:|--:|--:|"
    every = len(PROMPTS) * PIXELS * PIXELS * 3
    for title, rows in found.items():
        for strategy, wire, _, figures in rows:
            cells = [title, strategy, figures.get("mesh", ""), wire, f"{figures['largest']:.2g}", f"{figures['bytes_changed']} of {every}"]
            for key, unit in (("step_ms", "ms"), ("attention_kib", "KiB"), ("process_mib", "MiB"), ("sent_kib", "KiB")):
                cells.append(f"{figures[key]:.0f} {unit}" if key in figures else "")
            yield f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the pictures and the table are written")
    parser.add_argument("--weights", help="folder of the trained transformer; made if it is not there")
    parser.add_argument("--train-steps", type=int, default=900)
    parser.add_argument("--steps", type=int, default=20, help="steps of a picture")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.weights is None or not Path(options.weights).exists():
            train(options.train_steps).save_pretrained(options.weights or f"{folder}/weights")
        transformer = SD3Transformer2DModel.from_pretrained(options.weights or f"{folder}/weights").eval()
        transformer.save_pretrained(f"{folder}/weights")
        alone, found = compare(folder, options.ranks, transformer, options.steps)
    options.folder.mkdir(parents=True, exist_ok=True)
    sheet(alone, found).save(options.folder / "pictures.png", optimize=True)
    lines = "\n".join(table(found))
    (options.folder / "table.md").write_text(f"{lines}\n", encoding="utf-8")
    figures = [{"ranks": title, "strategy": name, "wire": wire, **more} for title, rows in found.items() for name, wire, _, more in rows]
    (options.folder / "figures.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print(lines)


if __name__ == "__main__":
    main()
