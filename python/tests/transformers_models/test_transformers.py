"""Split models of transformers against the unsplit ones, on ranks of this process."""

import copy
import threading

import pytest
import torch
import transformers
from tiny_models import FAMILIES, build, error, in_float64, on_ranks, output, reference, texts

import kyklos
import kyklos.transformers
from kyklos.transformers import _checks, _hooks, _inputs, _masks, _split

SHARES = [[1, 1], [3, 7], [2, 1, 5], [1, 30]]
DECODERS = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss"]


def call(**inputs):
    return lambda model, handle, group: output(model, **inputs)


def left_padded(batch=3, tokens=23):
    """input_ids and attention_mask with 0, 4, 8, … tokens of padding on the left."""
    ids, mask = texts(batch, tokens), torch.ones(batch, tokens, dtype=torch.long)
    for entry in range(batch):
        mask[entry, : 4 * entry] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def right_padded(batch=3, tokens=23):
    padded = left_padded(batch, tokens)
    return {name: value.flip(1) for name, value in padded.items()}


def packed(tokens=(7, 10, 6)):
    positions = torch.cat([torch.arange(count) for count in tokens])[None]
    return {"input_ids": texts(1, sum(tokens)), "position_ids": positions, "use_cache": False}


# -- one pass --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_pass_is_the_unsplit_one(family, shares):
    model = build(family)
    inputs = {"input_ids": texts(2, 31)}
    exact, bound, seen = reference(model, **inputs)
    for got in on_ranks(model, len(shares), call(**inputs), shares=shares):
        assert got.shape == exact.shape
        assert error(got, exact, seen) <= bound


@pytest.mark.parametrize("family", DECODERS + ["gpt2", "bert", "albert", "modernbert", "xlm-roberta"])
@pytest.mark.parametrize("make", [left_padded, right_padded])
def test_padding_on_either_side(family, make):
    model = build(family)
    inputs = make()
    if family == "xlm-roberta":
        # Its positions count what is not the padding token.
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 1)
    exact, bound, seen = reference(model, **inputs)
    for got in on_ranks(model, 3, call(**inputs), shares=[2, 1, 5]):
        assert error(got, exact, seen) <= bound


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt-oss"])
def test_packed_documents(family):
    """gpt-oss does not tell documents apart by position_ids; the others do, without a cache."""
    model = build(family)
    inputs = packed()
    exact, bound, seen = reference(model, **inputs)
    for got in on_ranks(model, 3, call(**inputs), shares=[2, 1, 5]):
        assert error(got, exact, seen) <= bound


def test_positions_that_a_model_makes_of_its_mask():
    """OPT counts positions without the padding. generate() passes them; other calls have to."""
    model = build("opt")
    inputs = left_padded()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    want = output(model, **inputs)
    greedy = model.generate(**inputs, max_new_tokens=20, do_sample=False)

    def work(model, handle, group):
        with pytest.raises(kyklos.RequestError, match="pass position_ids"):
            output(model, **inputs)
        return output(model, **inputs, position_ids=positions), model.generate(
            **inputs, max_new_tokens=20, do_sample=False
        )

    for got, tokens in on_ranks(model, 2, work):
        seen = inputs["attention_mask"].bool()
        assert torch.allclose(got[seen], want[seen], atol=1e-4)
        assert torch.equal(tokens, greedy)


def test_packed_documents_that_differ_by_batch_entry():
    model = build("llama")
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(23 - n)]) for n in (5, 16)])
    inputs = {"input_ids": texts(2, 23), "position_ids": positions, "use_cache": False}
    exact, bound, seen = reference(model, **inputs)
    for got in on_ranks(model, 2, call(**inputs), shares=[3, 7]):
        assert error(got, exact, seen) <= bound


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_few_tokens(tokens):
    """Fewer tokens than ranks are computed by all of them."""
    model = build("mistral")
    inputs = {"input_ids": texts(2, tokens), "use_cache": False}
    exact, bound, seen = reference(model, **inputs)
    for got in on_ranks(model, 3, call(**inputs), shares=[1, 30, 1]):
        assert error(got, exact, seen) <= bound


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "longrope",
            "long_factor": [3.0] * 4,
            "short_factor": [1.0] * 4,
            "original_max_position_embeddings": 16,
            "factor": 32.0,
            "rope_theta": 10000.0,
        },
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16, "rope_theta": 10000.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_rope_scales_with_the_longest_position_of_all_ranks(scaling, monkeypatch):
    """Rank 0 of 3 has positions below 16 only."""
    model = build(
        "llama", rope_parameters=scaling, max_position_embeddings=512 if scaling["rope_type"] == "longrope" else 16
    )
    inputs = {"input_ids": texts(2, 31)}
    exact, bound, seen = reference(model, **inputs)
    for got in on_ranks(model, 3, call(**inputs), shares=[2, 1, 5]):
        assert error(got, exact, seen) <= bound
    if scaling["rope_type"] != "llama3":
        monkeypatch.setattr(_hooks, "longest_position", lambda base, undo: None)
        wrong = on_ranks(model, 3, call(**inputs), shares=[2, 1, 5], check=False)
        assert max(error(got, exact, seen) for got in wrong) > 100 * bound


@pytest.mark.parametrize("mesh", ["1x4", "2x2", "4x1"])
def test_meshes(mesh):
    model = build("llama", num_key_value_heads=4)
    inputs = {"input_ids": texts(2, 31)}
    exact, bound, seen = reference(model, **inputs)
    for got in on_ranks(model, 4, call(**inputs), mesh=mesh, shares=[1, 2, 3, 4]):
        assert error(got, exact, seen) <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types(dtype):
    model = build("llama").to(dtype)
    inputs = {"input_ids": texts(2, 31)}
    exact = output(in_float64(model), **inputs)
    rounding = float((output(model, **inputs).double() - exact).abs().max())
    for got in on_ranks(model, 2, call(**inputs)):
        assert got.dtype == dtype
        assert float((got.double() - exact).abs().max()) <= 2 * rounding


def test_autocast():
    model = build("llama")
    inputs = {"input_ids": texts(2, 31)}
    exact = output(in_float64(model), **inputs)

    def mixed(model, *_):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return output(model, **inputs)

    rounding = float((mixed(model).double() - exact).abs().max())
    for got in on_ranks(model, 2, mixed):
        assert float((got.double() - exact).abs().max()) <= 2 * rounding


def test_inputs_embeds_and_positional_arguments():
    model = build("llama")
    ids = texts(2, 23)
    embeds = model.get_input_embeddings()(ids).detach()
    exact, bound, seen = reference(model, input_ids=ids)

    def work(model, handle, group):
        with torch.no_grad():
            return output(model, inputs_embeds=embeds), model(ids).logits, model(ids, return_dict=False)[0]

    for values in on_ranks(model, 2, work):
        for got in values:
            assert error(got, exact, seen) <= bound


def test_bodies_alone_and_hidden_states():
    model = build("qwen3")
    ids = texts(2, 23)
    with torch.no_grad():
        want = model.model(ids, output_hidden_states=True)

    def work(model, handle, group):
        with torch.no_grad():
            return model.model(ids, output_hidden_states=True)

    for got in on_ranks(model, 2, work, shares=[3, 7]):
        assert len(got.hidden_states) == len(want.hidden_states) == 4
        assert torch.allclose(got.last_hidden_state, want.last_hidden_state, atol=1e-4)
        for one, other in zip(got.hidden_states, want.hidden_states, strict=True):
            assert torch.allclose(one, other, atol=1e-4)


def test_poolers_and_heads_see_the_tokens_of_all_ranks():
    bert = build("bert")
    ids = texts(2, 23)
    with torch.no_grad():
        want = bert(ids).pooler_output
    for got in on_ranks(bert, 3, lambda model, handle, group: model(ids).pooler_output.detach(), shares=[2, 1, 5]):
        assert torch.allclose(got, want, atol=1e-5)
    torch.manual_seed(3)
    judge = transformers.LlamaForSequenceClassification(build("llama").config).eval()
    inputs = right_padded()
    want = output(judge, **inputs)
    for got in on_ranks(judge, 2, call(**inputs)):
        assert torch.allclose(got, want, atol=1e-4)


def test_loss_and_the_last_logits():
    model = build("llama")
    ids = texts(2, 23)
    with torch.no_grad():
        loss, last = model(ids, labels=ids).loss, model(ids, logits_to_keep=3).logits

    def work(model, handle, group):
        with torch.no_grad():
            return model(ids, labels=ids).loss, model(ids, logits_to_keep=3).logits

    for got_loss, got_last in on_ranks(model, 3, work, shares=[5, 9, 1]):
        assert torch.allclose(got_loss, loss, rtol=1e-5)
        assert got_last.shape == last.shape and torch.allclose(got_last, last, atol=1e-4)


def test_rows_stay_on_their_ranks_with_gather_none():
    model = build("llama")
    ids = texts(2, 23)
    exact, bound, seen = reference(model, input_ids=ids)
    greedy = model.generate(ids, max_new_tokens=8, do_sample=False)

    def work(model, handle, group):
        return handle.rows(23), output(model, input_ids=ids), model.generate(ids, max_new_tokens=8, do_sample=False)

    ends = []
    for (first, end), got, tokens in on_ranks(model, 3, work, shares=[2, 1, 5], gather="none"):
        assert got.shape[1] == end - first
        assert error(got, exact[:, first:end], seen[:, first:end]) <= bound
        assert torch.equal(tokens, greedy)
        ends += [first, end]
    assert ends[0] == 0 and ends[-1] == 23 and ends[1:-1:2] == ends[2:-1:2]


def test_a_compiled_layer():
    """The attention function breaks its graph, and is called as often as before."""
    model = build("llama")
    ids = texts(2, 23)
    exact, bound, seen = reference(model, input_ids=ids)
    greedy = model.generate(ids, max_new_tokens=8, do_sample=False)

    def work(model, handle, group):
        model.model.layers[1].compile(backend="eager")
        return output(model, input_ids=ids), model.generate(ids, max_new_tokens=8, do_sample=False)

    for got, tokens in on_ranks(model, 2, work, shares=[3, 7]):
        assert error(got, exact, seen) <= bound
        assert torch.equal(tokens, greedy)


def test_remove_restores_the_model():
    model = build("gemma2")
    ids = texts(1, 12)
    want = output(model, input_ids=ids)

    def work(model, handle, group):
        split = output(model, input_ids=ids)
        handle.remove()
        handle.remove()
        names = ("forward", "generate", "_prepare_cache_for_generation", "_get_stopping_criteria")
        assert not any(name in part.__dict__ for part in (model, model.model) for name in names)
        assert model.config._attn_implementation == model.model.config._attn_implementation == "eager"
        with pytest.raises(ValueError, match="no longer split"):
            handle.cache()
        return split, output(model, input_ids=ids)

    for split, restored in on_ranks(model, 2, work):
        assert torch.equal(restored, want) and not torch.equal(split, want)


# -- negative controls: what these tests would see if the seam were wrong ---------------------------------------------------


def drop_padding(monkeypatch):
    monkeypatch.setattr(_masks, "padding", lambda mask, keys: None)


def local_positions(monkeypatch):
    split, running = _split.SplitModel._split, threading.local()

    def run(self, given):
        running.split = self
        return split(self, given)

    def positions(base, inputs, past, shape):
        first, end = running.split.rows(shape[1])
        return torch.cat([torch.arange(first), torch.arange(end - first), torch.arange(shape[1] - end)])[None]

    monkeypatch.setattr(_split.SplitModel, "_split", run)
    monkeypatch.setattr(_inputs, "positions", positions)


def one_local_layer(monkeypatch):
    """The second layer attends to the tokens of its rank, as one that is outside of the interface would."""
    install = _split.SplitModel.install

    def installed(self, check):
        install(self, check)
        layer = self.base.get_submodule(self.traits.layers[1])
        layer.config = copy.deepcopy(layer.config)
        layer.config._attn_implementation = "eager"

    monkeypatch.setattr(_split.SplitModel, "install", installed)


@pytest.mark.parametrize("family", ["llama", "gemma3", "bert"])
@pytest.mark.parametrize("fault", [drop_padding, local_positions, one_local_layer])
def test_faults_exceed_the_bound_a_hundred_times(family, fault, monkeypatch):
    model = build(family)
    inputs = left_padded()
    exact, bound, seen = reference(model, **inputs)
    fault(monkeypatch)
    monkeypatch.setattr(_checks.Traits, "check", lambda self, forward: None)
    if fault is one_local_layer:
        # Its mask is that of the library again, of local tokens.
        inputs = {"input_ids": inputs["input_ids"]}
        exact, bound, seen = reference(model, **inputs)
    wrong = on_ranks(model, 2, lambda *args: try_output(*args, inputs), check=False)
    assert max(error(got, exact, seen) for got in wrong) > 100 * bound


def try_output(model, handle, group, inputs):
    for layer in handle._split.traits.layers:
        module = model.base_model.get_submodule(layer)
        if module.config._attn_implementation == "eager":
            attend = module.forward
            module.forward = lambda *args, attend=attend, **kwargs: attend(
                *args, **{name: None if name == "attention_mask" else value for name, value in kwargs.items()}
            )
    return output(model, **inputs, **_checks.without_cache(model.base_model))


def test_a_layer_that_attends_locally_is_an_error(monkeypatch):
    model = build("llama")
    one_local_layer(monkeypatch)
    inputs = {"input_ids": texts(1, 12)}

    def work(model, handle, group):
        with pytest.raises(
            kyklos.RequestError, match=r"2 attention calls in a pass over 3 layers; layers\.1\.self_attn attended"
        ):
            try_output(model, handle, group, inputs)

    on_ranks(model, 2, work)


def test_the_check_of_parallelize_finds_what_no_name_tells(monkeypatch):
    """A model that looks at the next token outside of attention."""
    model = build("llama")
    norm = type(model.model.norm)
    forward = norm.forward
    model.model.norm.mixes = True

    def mixed(self, hidden):
        return forward(self, hidden + hidden.cumsum(1) if getattr(self, "mixes", False) else hidden)

    monkeypatch.setattr(norm, "forward", mixed)
    with pytest.raises(kyklos.RequestError, match="does not compute the same when it is split"):
        on_ranks(model, 2, lambda model, handle, group: None)
