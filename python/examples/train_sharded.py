"""Trains adapters (LoRA) of a Llama: FSDP2 shards its weights, and Kyklos splits its texts, over the same processes.

    torchrun --nproc-per-node 2 train_sharded.py

The model is tiny and has random weights. A rank holds its part of each weight, of the gradients and of the optimizer's state, and computes its
tokens of each text.
"""

import peft
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import kyklos
import kyklos.transformers


def make_model():
    """A model with adapters, the same on all ranks: only the adapters learn."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, initializer_range=0.2, **sizes))
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    return model


def split(model, group, **options):
    """First the tokens, then the weights: layer by layer, then the rest."""
    kyklos.transformers.parallelize(model, group, gather="none", **options)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def train(model, batches, group=None):
    """The loss of each step, and the norm of its gradients. Without a group on one process."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss  # The part of this rank.
        # fully_shard sums the gradients of all ranks and divides by their number. There is no sum_gradients: it would sum them again.
        (loss if group is None else loss * group.size).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if group is not None:
            norm = norm.full_tensor()
            loss = loss.detach().clone()
            dist.all_reduce(loss)
        yield loss.item(), norm.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with kyklos.Group.from_torch(deadline_s=600) as group:
        model = make_model()
        split(model, group)
        text = torch.randint(256, (10, 1, 96), generator=torch.Generator().manual_seed(1))  # The same on all ranks.
        for step, (loss, norm) in enumerate(train(model, text, group)):
            print(f"step {step}: loss {loss:.4f}, norm of the gradients {norm:.4f}\n" * (group.rank == 0), end="", flush=True)
    dist.destroy_process_group()
