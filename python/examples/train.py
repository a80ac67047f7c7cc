"""Trains a small language model on the documents of this repository, for examples that generate text.

    python train.py FOLDER                                                              # 4 minutes on two cores, 3.1 MB
    torchrun --nproc-per-node 2 generate.py --model FOLDER --prompt "## Errors" --tokens 300 --seed 1

The model is a Llama of 0.8 million weights that reads and writes bytes. With the same versions of the libraries, the same documents
and the same number of threads, the weights are the same each time. Its text has the words of the documents and no sense.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 256
BATCH = 8
STEPS = 1000


def documents(folder):
    """The bytes of all documents, in the order of their names."""
    root = Path(folder)
    other = {"target", "node_modules", ".venv", "results"}
    files = [path for path in root.rglob("*.md") if not other & set(path.relative_to(root).parts)]
    if not files:
        raise SystemExit(f"no *.md in {root}: name the folder of the repository with --text")
    text = b"\n".join(path.read_bytes() for path in sorted(files))
    if len(text) < 16 * CONTEXT:
        raise SystemExit(f"{len(text)} bytes in the *.md of {root}: the training needs {16 * CONTEXT}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def tokenizer():
    """A token for each byte, whose number is not that of the byte."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise, clean_up_tokenization_spaces=False, model_input_names=inputs
    )


def numbers_of_bytes(tokens):
    """By byte, the number of its token."""
    # The characters that stand for bytes in ByteLevel: printable ones for themselves, the others from 256 on, in order.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return torch.tensor([tokens.convert_tokens_to_ids(characters[byte]) for byte in range(256)])


def train(text, steps):
    """A model after so many steps on random pieces of the text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    # Up in the first 50 steps, then down to a twentieth.
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
    )
    begin = time.monotonic()
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,))
        batch = torch.stack([text[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 50 == 0 or step == steps:
            seconds = time.monotonic() - begin
            print(
                f"step {step} of {steps}: {loss.item() / math.log(2):.2f} bits for a byte, {seconds:.0f} s", flush=True
            )
    return model.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where the model is written")
    parser.add_argument("--text", default=Path(__file__).parents[2], help="folder whose *.md are read")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    options = parser.parse_args()
    tokens = tokenizer()
    text = numbers_of_bytes(tokens)[documents(options.text)]
    model = train(text, options.steps)
    model.save_pretrained(options.folder)
    tokens.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
