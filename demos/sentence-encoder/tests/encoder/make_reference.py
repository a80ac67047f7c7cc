"""Writes reference.json: the demonstration's texts encoded by transformers in f64. Needs torch, transformers and tokenizers.

python demos/sentence-encoder/tests/encoder/make_reference.py     # after fetch-model.sh
"""

import json
import pathlib

import torch
from tokenizers import Tokenizer
from transformers import AutoModel

# Some builds of PyTorch for CUDA fail in this function where there is no CUDA.
torch.cuda.is_current_stream_capturing = lambda: False
here = pathlib.Path(__file__).parent
folder = here.parents[3] / "target/models/all-minilm-l6-v2"
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.no_padding()
tokenizer.no_truncation()
model = AutoModel.from_pretrained(folder).eval().double()

embeddings = []
with torch.no_grad():
    for line in (here.parents[1] / "texts.txt").read_text().splitlines():
        ids = tokenizer.encode(line).ids
        batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        mean = model(**batch).last_hidden_state[0].mean(0)
        embeddings.append(mean / mean.norm())
embeddings = torch.stack(embeddings)
reference = {
    "first_numbers": [[round(x, 7) for x in row] for row in embeddings[:, :8].tolist()],
    "cosines": [[round(x, 7) for x in row] for row in (embeddings @ embeddings.T).tolist()],
}
lines = [f' "{name}": [\n' + ",\n".join(f"  {row}" for row in rows) + "\n ]" for name, rows in reference.items()]
text = "{\n" + ",\n".join(lines) + "\n}\n"
assert json.loads(text) == reference
(here / "reference.json").write_text(text)
