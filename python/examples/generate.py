"""Text of a language model whose sequence is split over the ranks.

    torchrun --nproc-per-node 2 generate.py                                       # a tiny model with random weights
    torchrun --nproc-per-node 2 generate.py --model FOLDER --prompt "Once upon"   # a model of transformers

Every rank loads the whole model. On several hosts give torchrun --nnodes and --rdzv-endpoint.
"""

import argparse

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import kyklos
import kyklos.transformers


def load(folder, prompt):
    """A model, its inputs, and a function that turns tokens into text."""
    if folder is None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, initializer_range=0.2, eos_token_id=None, **sizes))
        ids = torch.tensor([list(prompt.encode())])
        return model.eval(), {"input_ids": ids}, lambda tokens: bytes(tokens.tolist()).decode(errors="replace")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.eval(), tokenizer(prompt, return_tensors="pt"), tokenizer.decode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name of a model; by default a tiny one with random weights")
    parser.add_argument("--prompt", default="Keys and values are spread over the ranks.")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens")
    parser.add_argument("--seed", type=int, help="draw the tokens, with this seed; by default the most likely ones")
    parser.add_argument("--shares", type=float, nargs="+", help="tokens of the ranks in proportion")
    parser.add_argument("--device", default="auto", help="device of attention on this rank: cpu, wgpu, …")
    options = parser.parse_args()
    model, inputs, text_of = load(options.model, options.prompt)
    dist.init_process_group("gloo")
    # The first compilation of a model may take minutes on one rank.
    with kyklos.Group.from_torch(device=options.device, deadline_s=600) as group:
        handle = kyklos.transformers.parallelize(model, group, shares=options.shares)
        cache = handle.cache()
        draw = options.seed is not None
        if draw:
            # Only rank 0 draws; the others take its tokens.
            torch.manual_seed(options.seed)
        tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=options.tokens, do_sample=draw)
        # With its end in one piece, so that lines of ranks do not mix.
        print(f"rank {group.rank}: {cache.length} tokens in the cache, {cache.bytes} bytes here\n", end="", flush=True)
        if group.rank == 0:
            print(text_of(tokens[0]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
