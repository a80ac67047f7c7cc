"""What ranks of a split model compare: embeddings that are inputs, and weights that learn."""

import pytest
import torch
import transformers
from tiny_models import COMMON, VOCABULARY, build, build_class, on_ranks, output, texts

import kyklos
import kyklos.torch
import kyklos.transformers
from kyklos._models import weights
from kyklos._models.projections import signs

IDS = texts(2, 19)


def embedded(model, ids=IDS):
    return model.get_input_embeddings()(ids).detach()


def usable(group):
    ones = torch.ones(1, 8, 1, 8)
    group.attend(ones, ones, ones, layout="bshd", label="after")


# -- embeddings ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("text", "token"), [(0, 0), (1, 18), (0, 11)])
def test_embeddings_of_another_token_are_an_error_of_all_ranks(dtype, text, token):
    """The shapes are equal, and so are all other tokens."""
    model = build("llama").to(dtype)

    def work(model, handle, group):
        embeds = embedded(model)
        want = output(model, inputs_embeds=embeds)
        if group.rank == 1:
            other = int(IDS[text, token]) % (VOCABULARY - 4) + 3
            embeds[text, token] = embedded(model, torch.tensor(other))
        with pytest.raises(kyklos.RequestError) as raised:
            output(model, inputs_embeds=embeds)
        # The group and the count of passes are as they were.
        assert torch.equal(output(model, inputs_embeds=embedded(model)), want)
        return str(raised.value), raised.value.rank

    results = on_ranks(model, 3, work)
    assert {*results} == {(results[0][0], 1)}
    assert f"rank 1 has other values of inputs_embeds[{text}, {token}] than rank 0" in results[0][0]


def test_embeddings_that_differ_by_rounding_are_taken():
    """A tower of 16 bits leaves 1e-2 to 3e-2 of the norm on unlike devices. Here that is in each of 3072 rows."""
    model = build("llama")
    ids = texts(6, 512)

    def work(model, handle, group):
        embeds = embedded(model, ids)
        noise = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(group.rank))
        noise *= 0.02 * embeds.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        for scale in (1, 1e-18, 1e15):
            output(model, inputs_embeds=(embeds + noise) * scale, use_cache=False)
        with torch.no_grad():
            embeds[5, 400:] = torch.nan
        output(model, inputs_embeds=embeds, use_cache=False)

    on_ranks(model, 2, work)


def test_targets_that_are_numbers_are_compared():
    model = build_class(
        "LlamaForSequenceClassification", "LlamaConfig", {**COMMON, "num_labels": 1, "problem_type": "regression"}
    )

    def work(model, handle, group):
        model(input_ids=IDS, labels=torch.tensor([0.5, 2.0]))
        with pytest.raises(kyklos.RequestError, match="rank 1 has other values of labels than rank 0"):
            model(input_ids=IDS, labels=torch.tensor([0.5, 2.0 + group.rank]))
        usable(group)

    on_ranks(model, 2, work)


def test_masks_of_numbers_are_compared():
    def work(model, handle, group):
        mask = torch.ones(2, 19)
        output(model, input_ids=IDS, attention_mask=mask)
        mask[1, :4] = group.rank
        with pytest.raises(kyklos.RequestError, match="label"):
            output(model, input_ids=IDS, attention_mask=mask)
        usable(group)

    on_ranks(build("llama"), 2, work)


class Favourite(transformers.LogitsProcessor):
    """Chooses the same token in each step."""

    def __init__(self, token):
        self.token = token

    def __call__(self, ids, scores):
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self.token] = 0.0
        return chosen


def llava():
    text = {**COMMON, "num_hidden_layers": 2}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
        ),
        image_token_id=90,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def test_ranks_that_choose_other_tokens_around_the_split_model_are_refused():
    """``generate()`` of the model around is that of each rank, as it is with the seeds of ranks."""
    models = [llava() for _ in range(2)]
    ids = torch.full((1, 24), 5)
    ids[0, 4:20] = 90
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["pixel_values"] = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(3))

    def generate(model, handle, token):
        favourite = transformers.LogitsProcessorList([Favourite(token)])
        options = {"max_new_tokens": 5, "do_sample": True, "logits_processor": favourite}
        return model.generate(**inputs, **options, past_key_values=handle.cache())[0, 24:].tolist()

    def work(group):
        model = models[group.rank]
        handle = kyklos.transformers.parallelize(model.model.language_model, group)
        assert generate(model, handle, 7) == [7] * 5
        with pytest.raises(kyklos.RequestError) as raised:
            generate(model, handle, 7 + group.rank)
        assert generate(model, handle, 9) == [9] * 5
        return str(raised.value)

    first, second = kyklos.run_local(2, work, device="cpu")
    assert first == second and "rank 1 has other values of inputs_embeds[0, 0]" in first and "the same seed" in first


def test_projections_are_about_the_norm_and_the_same_everywhere():
    assert signs(3, 4).tolist() == [[1, -1, -1, 1], [-1, -1, 1, 1], [-1, 1, 1, -1]]
    assert abs(signs(1000, 8).mean()) < 0.02
    generator = torch.Generator().manual_seed(2)
    for shape in ((4000,), (3, 5000), (400, 700), (8, 20, 30), (1, 9), ()):
        x = torch.randn(shape, generator=generator)
        *projections, norm = weights._project(x).tolist()
        if x.numel() > 9:
            assert 0.5 < torch.tensor(projections).square().mean().sqrt() / x.norm() < 2
            assert 0.7 < norm / x.norm() < 1.4


# -- weights that learn ----------------------------------------------------------------------------------------------------------


def train(model, group, steps, summed, lr=0.1, optimizer=torch.optim.SGD, unlike=lambda weight, generator: None):
    """Steps in training, with the gradients of the parameters that ``summed`` chooses summed over the ranks. ``unlike`` is what the device
    of rank 1 does to weights."""
    ids = texts(2, 23)
    optimizer = optimizer(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        kyklos.torch.sum_gradients([one for name, one in model.named_parameters() if summed(name)], group)
        optimizer.step()
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for one in model.parameters() if group.rank else ():
                unlike(one, generator)


def refused(steps, summed, **options):
    """The error of the first pass after ``steps``, the same on all ranks."""

    def work(model, handle, group):
        train(model.train(), group, steps, summed, **options)
        with pytest.raises(kyklos.RequestError) as raised:
            train(model, group, 1, summed, **options)
        # It stays an error while the weights differ.
        with pytest.raises(kyklos.RequestError, match="since the last pass"):
            train(model, group, 1, summed, **options)
        usable(group)
        return str(raised.value)

    return work


@pytest.mark.parametrize(
    ("dtype", "optimizer", "lr"),
    [
        (torch.float32, torch.optim.SGD, 0.1),
        (torch.float32, torch.optim.SGD, 1e-3),
        (torch.float32, torch.optim.AdamW, 1e-5),
        (torch.bfloat16, torch.optim.SGD, 0.1),
        (torch.bfloat16, torch.optim.AdamW, 1e-3),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [2, 3])
def test_steps_with_gradients_of_one_rank_are_an_error_of_all(size, dtype, optimizer, lr):
    work = refused(1, lambda name: False, optimizer=optimizer, lr=lr)
    errors = {*on_ranks(build("llama").to(dtype), size, work, gather="none")}
    assert len(errors) == 1
    assert "other weights of LlamaForCausalLM than rank 0 since the last pass" in (text := errors.pop())
    assert "call kyklos.torch.sum_gradients(model.parameters(), group) after backward()" in text


def test_a_parameter_that_is_left_out_is_named():
    name = "model.layers.1.mlp.down_proj.weight"
    work = refused(1, lambda one: one != name)
    assert all(name in text for text in on_ranks(build("llama"), 2, work, gather="none"))


def rounded(weight, generator):
    """The last bits of float32."""
    weight.mul_(1 + 1e-7 * torch.randn(weight.shape, generator=generator))


def at_a_tie(weight, generator):
    """The last bit of one element of 16 bits, which moves while most others do not."""
    place = torch.randint(weight.numel(), (1,), generator=generator)
    weight.view(-1)[place] *= 1 + 2**-7


@pytest.mark.parametrize(("dtype", "unlike"), [(torch.float32, rounded), (torch.bfloat16, at_a_tie)], ids=str)
@pytest.mark.parametrize("lr", [0.0, 1e-5, 1e-3])
def test_steps_that_rounding_makes_unlike_are_taken(lr, dtype, unlike):
    model = build("llama").to(dtype)

    def work(model, handle, group):
        before = model.lm_head.weight.detach().clone()
        train(model.train(), group, 20, lambda name: True, lr=lr, optimizer=torch.optim.AdamW, unlike=unlike)
        return model.lm_head.weight.detach(), before

    (first, before), (second, _) = on_ranks(model, 2, work, gather="none")
    assert not torch.equal(first, second)
    assert lr == 0 or not torch.equal(first, before)


def test_weights_that_are_loaded_on_one_rank_are_an_error_of_all_until_they_are_loaded_on_all():
    other = build("llama", seed=5).state_dict()

    def work(model, handle, group):
        model.train()
        model(input_ids=IDS, labels=IDS)
        if group.rank == 0:
            model.load_state_dict(other)
        with pytest.raises(kyklos.RequestError, match="rank 1 has other weights"):
            model(input_ids=IDS, labels=IDS)
        if group.rank == 1:
            model.load_state_dict(other)
        return model(input_ids=IDS, labels=IDS).loss

    first, second = on_ranks(build("llama"), 2, work)
    assert torch.equal(first, second)


def test_weights_are_read_again_only_if_they_have_changed(monkeypatch):
    read = []
    project = weights._project
    monkeypatch.setattr(weights, "_project", lambda x: read.append(x.shape) or project(x))

    def work(model, handle, group):
        model.lm_head.weight.requires_grad_(False)
        for _ in range(3):
            model(input_ids=IDS, labels=IDS)
        output(model, input_ids=IDS)
        with torch.no_grad():
            model.model.norm.weight.add_(1.0)
        model(input_ids=IDS, labels=IDS)

    model = build("llama")
    on_ranks(model, 2, work)
    assert len(read) == 2 * len(list(model.parameters()))
