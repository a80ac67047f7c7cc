"""Denoises a video whose tokens are split over the ranks, and compares it with the unsplit transformer.

    python -m torch.distributed.run --standalone --nproc-per-node=2 denoise.py
    python -m torch.distributed.run --nproc-per-node=2 denoise.py --path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --device cuda

Without a path the transformer is tiny and has random weights. Hosts of unlike speed take unlike shares: --shares 3 1.
"""

import argparse

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

import kyklos
import kyklos.diffusers

parser = argparse.ArgumentParser()
parser.add_argument("--path", help="a Wan pipeline: a folder or a name on the hub")
parser.add_argument("--prompt", default="a cat walks on the grass")
parser.add_argument("--shares", type=float, nargs="+")
parser.add_argument("--mesh")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.manual_seed(0)
if args.path:
    pipe = WanPipeline.from_pretrained(args.path, torch_dtype=torch.bfloat16).to(args.device)
    inputs = {"prompt": args.prompt, "height": 480, "width": 832, "num_frames": 33}
else:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 64, "text_dim": 16}
    transformer = WanTransformer3DModel(in_channels=4, out_channels=4, freq_dim=16, **sizes)
    pipe = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(shift=3.0), transformer)
    prompts = {"prompt_embeds": torch.randn(1, 12, 16), "negative_prompt_embeds": torch.randn(1, 12, 16)}
    inputs = {**prompts, "height": 80, "width": 112, "num_frames": 9}


def denoise():
    generator = torch.Generator().manual_seed(0)  # The same on all ranks.
    return pipe(**inputs, num_inference_steps=args.steps, generator=generator, output_type="latent").frames


dist.init_process_group("gloo")
with kyklos.Group.from_torch() as group:
    pipe.set_progress_bar_config(disable=group.rank > 0)
    with kyklos.diffusers.parallelize(pipe.transformer, group, mesh=args.mesh, shares=args.shares):
        latents = denoise()
    if group.rank == 0:
        print(f"{group.size} ranks: latents {list(latents.shape)}")
        if not args.path:
            difference = (latents - denoise()).abs().max().item()
            print(f"largest difference from the unsplit transformer: {difference:.1e}")
dist.destroy_process_group()
