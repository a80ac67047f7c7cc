"""Split encoder-decoders, and encoders of them alone, against one process."""

import copy

import pytest
import torch
import transformers
from tiny_encoder_decoders import ENCODER_DECODERS, encoder_decoder, of_class, source, targets
from tiny_models import on_ranks

import kyklos
import kyklos.torch
import kyklos.transformers
from kyklos.transformers._stacks import passes, split

SHARES = [[3, 7], [2, 1, 5]]
# The kinds of mechanisms on both shares, their kin on one.
_IN_DEPTH = ("T5", "UMT5", "Bart", "Whisper")
CASES = [(name, shares) for name in ENCODER_DECODERS for shares in (SHARES if name in _IN_DEPTH else SHARES[1:])]


def in_double(inputs):
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def learned(model, **inputs):
    """The loss, the logits and the gradients of a model."""
    output = model(**inputs)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return output.loss.detach(), output.logits.detach(), gradients


def close(got, exact, plain, rest=3e-6, floor=0.0):
    """Within twice the rounding of one process in float32, which may happen to be exact."""
    return (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + rest * exact.abs().max() + floor


def check(results, model, **inputs):
    """Loss, logits and the sums of gradients of each rank against float64. Gradients of some biases of keys are zero, and rounding of
    larger ones is what there is of them; a token that is missing is an error of 1e-3."""
    exact = learned(copy.deepcopy(model).double(), **in_double(inputs))
    plain = learned(copy.deepcopy(model), **inputs)
    floor = 1e-7 * max(gradient.abs().max() for gradient in exact[2].values())
    for loss, logits, gradients in results:
        assert close(loss, exact[0], plain[0], 1e-6)
        assert close(logits, exact[1], plain[1])
        assert gradients.keys() == exact[2].keys()
        for name, ours in gradients.items():
            assert torch.equal(ours, results[0][2][name]), name
            assert close(ours, exact[2][name], plain[2][name], floor=floor), name


def step(**inputs):
    """A rank's step: loss, logits, and the gradients summed over the ranks."""

    def work(model, handle, group):
        output = model(**inputs)
        (output.loss / group.size).backward()
        kyklos.torch.sum_gradients(model.parameters(), group)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        return output.loss.detach(), output.logits.detach(), gradients

    return work


@pytest.mark.parametrize(("name", "shares"), CASES, ids=str)
def test_loss_logits_and_gradients(name, shares):
    model, inputs = encoder_decoder(name), {**source(name), "labels": targets()}
    check(on_ranks(model, len(shares), step(**inputs), shares=shares), model, **inputs)


def greedy(model, **inputs):
    # Without the limit on repetition random models say a few tokens only.
    return model.generate(**inputs, max_new_tokens=20, do_sample=False, no_repeat_ngram_size=1)


@pytest.mark.parametrize(("name", "shares"), CASES, ids=str)
def test_greedy_texts_are_those_of_one_process(name, shares):
    model, inputs = encoder_decoder(name), source(name)
    want = greedy(model, **inputs)

    def work(model, handle, group):
        return greedy(model, **inputs), greedy(model, **inputs, use_cache=False)

    for cached, whole in on_ranks(model, len(shares), work, shares=shares):
        assert torch.equal(cached, want) and torch.equal(whole, want)


def test_samples_are_those_of_rank_0():
    model, inputs = encoder_decoder("T5"), source("T5")
    texts = on_ranks(model, 3, lambda model, *_: model.generate(**inputs, max_new_tokens=20, do_sample=True, num_return_sequences=2))
    assert texts[0].shape == (4, 21) and all(torch.equal(text, texts[0]) for text in texts)


def test_speech_in_languages_with_times_and_of_any_length():
    """Whisper has a ``generate()`` of its own, which calls the model also for the language, and once for each part of a long sound."""
    model, inputs = encoder_decoder("Whisper"), source("Whisper")
    settings = model.generation_config
    settings.is_multilingual, settings.lang_to_id, settings.task_to_id = True, {"<|en|>": 50, "<|de|>": 51}, {"transcribe": 52}
    settings.no_timestamps_token_id, settings.prev_sot_token_id, settings.eos_token_id, settings.pad_token_id = 60, 54, 96, 96
    settings.max_initial_timestamp_index, settings.return_timestamps = 3, False
    mask = torch.ones(2, 130, dtype=torch.long)
    mask[1, 100:] = 0
    sounds = torch.randn(2, 8, 130, generator=torch.Generator().manual_seed(2))

    def texts(model):
        return [
            model.generate(**inputs, max_new_tokens=12, language="en", task="transcribe"),
            model.generate(**inputs, max_new_tokens=12),
            model.generate(**inputs, max_new_tokens=12, language="en", return_timestamps=True),
            model.generate(sounds, attention_mask=mask, max_new_tokens=20, language="en", return_timestamps=True),
        ]

    want = texts(model)
    for got in on_ranks(model, 2, lambda model, *_: texts(model), shares=[3, 7]):
        assert all(torch.equal(text, right) for text, right in zip(got, want, strict=True))


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", ["T5EncoderModel", "UMT5EncoderModel", "Whisper", "Bart"])
def test_encoders_alone(name, shares):
    model = of_class(name, name.replace("EncoderModel", "Config")) if "5" in name else encoder_decoder(name).get_encoder()
    inputs = source(name)
    rows = inputs["attention_mask"].bool() if "attention_mask" in inputs else slice(None)

    def states(model, inputs=inputs, **options):
        return [state.detach() for state in model(**inputs, output_hidden_states=True).hidden_states]

    exact, plain = states(copy.deepcopy(model).double(), in_double(inputs)), states(model)

    def work(model, handle, group):
        last = model(**inputs).last_hidden_state.detach()
        first, end = handle.rows(last.shape[1])
        assert handle.counts(last.shape[1])[group.rank] == end - first
        return states(model), last

    for got, last in on_ranks(model, len(shares), work, shares=shares):
        assert len(got) == len(exact) and torch.equal(got[-1], last)
        for own, right, one in zip(got, exact, plain, strict=True):
            assert close(own[rows], right[rows], one[rows])

    def own_rows(model, handle, group):
        return model(**inputs).last_hidden_state.detach()

    parts = torch.cat(on_ranks(model, len(shares), own_rows, shares=shares, gather="none"), 1)
    assert close(parts[rows], exact[-1][rows], plain[-1][rows])


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        ("T5ForTokenClassification", "T5Config"),
        ("T5ForQuestionAnswering", "T5Config"),
        ("BartForSequenceClassification", "BartConfig"),
        ("WhisperForAudioClassification", "WhisperConfig"),
    ],
)
def test_other_heads(cls, config):
    model, inputs = of_class(cls, config, **({"eos_token_id": 5} if "Sequence" in cls else {})), source(config)
    if "Sequence" in cls:
        inputs["input_ids"][inputs["input_ids"] == 5] = 6
        inputs["input_ids"][:, 12] = 5

    def first(model, inputs=inputs):
        with torch.no_grad():
            output = model(**inputs, **({} if "Classification" in cls else {"use_cache": False}))
        return output.start_logits if "Question" in cls else output.logits

    exact, plain = first(copy.deepcopy(model).double(), in_double(inputs)), first(model)
    rows = inputs["attention_mask"].bool() if "Token" in cls else slice(None)
    for got in on_ranks(model, 2, lambda model, *_: first(model), shares=[3, 7]):
        assert close(got[rows], exact[rows], plain[rows])


@pytest.mark.parametrize("options", [{"mesh": "2x1"}, {"strategy": "pass-q"}, {"strategy": "gather"}], ids=str)
def test_meshes_and_strategies(options):
    model, inputs = encoder_decoder("T5"), {**source("T5"), "labels": targets()}
    check(on_ranks(model, 2, step(**inputs), shares=[3, 7], **options), model, **inputs)


def test_checkpoints_of_layers():
    for name in ("T5", "Bart"):
        model, inputs = encoder_decoder(name, attention_dropout=0.0).train(), {**source(name), "labels": targets()}
        model.gradient_checkpointing_enable()
        check(on_ranks(model, 2, step(**inputs), shares=[3, 7]), model, **inputs)


@pytest.mark.parametrize("counts", [(2, 2), (23, 2), (2, 17)], ids=str)
def test_few_tokens_have_gradients(counts):
    """Fewer tokens than ranks, in the encoder, in the decoder and in both: all ranks compute them."""
    model = encoder_decoder("UMT5")
    inputs = {"input_ids": source("UMT5", counts[0])["input_ids"].clamp(min=3), "labels": targets(counts[1]).clamp(min=3)}
    check(on_ranks(model, 3, step(**inputs), shares=[2, 1, 5]), model, **inputs)


def test_passes_with_a_cache_that_follow_each_other():
    model, inputs, ids = encoder_decoder("T5"), source("T5"), targets().clamp(min=3)

    def parts(model):
        with torch.no_grad():
            first = model(**inputs, decoder_input_ids=ids[:, :9])
            states = transformers.modeling_outputs.BaseModelOutput(first.encoder_last_hidden_state)
            rest = {"encoder_outputs": states, "attention_mask": inputs["attention_mask"], "past_key_values": first.past_key_values}
            return torch.cat([first.logits, model(**rest, decoder_input_ids=ids[:, 9:]).logits], 1)

    exact, plain = parts(copy.deepcopy(model).double()), parts(model)
    for got in on_ranks(model, 2, lambda model, *_: parts(model), shares=[3, 7]):
        assert close(got, exact, plain)


def test_padding_of_the_decoder():
    for name in ("T5", "Bart"):
        model, inputs, ids = encoder_decoder(name), source(name), targets().clamp(min=3)
        mask = torch.ones_like(ids)
        mask[0, :4] = mask[1, 5:7] = 0
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}

        def logits(model, inputs=inputs):
            with torch.no_grad():
                return [model(**inputs, use_cache=use).logits[inputs["decoder_attention_mask"].bool()] for use in (False, True)]

        (exact, _), (plain, _) = logits(copy.deepcopy(model).double()), logits(model)
        for both in on_ranks(model, 2, lambda model, *_: logits(model), shares=[3, 7]):  # noqa: B023
            assert all(close(got, exact, plain) for got in both)


def test_types_of_16_bits():
    model, inputs = encoder_decoder("T5").to(torch.bfloat16), {**source("T5"), "labels": targets()}
    exact = learned(copy.deepcopy(model).double(), **inputs)
    plain = learned(copy.deepcopy(model), **inputs)
    for loss, logits, _ in on_ranks(model, 2, step(**inputs), shares=[3, 7]):
        assert close(logits, exact[1], plain[1], 1e-2) and close(loss, exact[0], plain[0], 1e-2)


def test_a_step_without_summed_gradients_is_found():
    model, inputs = encoder_decoder("Bart"), {**source("Bart"), "labels": targets()}

    def work(model, handle, group):
        model(**inputs).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(kyklos.RequestError, match="rank 1 has other weights of Bart.*call kyklos.torch.sum_gradients"):
            model(**inputs)

    on_ranks(model, 2, work, shares=[3, 7])


def test_copies_and_restored_models():
    model, inputs = encoder_decoder("T5"), source("T5")
    with torch.no_grad():
        want = model(**inputs, decoder_input_ids=targets().clamp(min=3), use_cache=False).logits

    def work(model, handle, group):
        again = copy.deepcopy(model)
        handle.remove()
        with torch.no_grad():
            split = again(**inputs, decoder_input_ids=targets().clamp(min=3), use_cache=False).logits
            calls = group.report
            alone = model(**inputs, decoder_input_ids=targets().clamp(min=3), use_cache=False).logits
        assert calls == group.report
        for module in model.modules():
            assert not {"forward", "compute_bias", "generate"} & module.__dict__.keys() and not module._forward_pre_hooks
        return split, alone

    for of_ranks, alone in on_ranks(model, 2, work, shares=[3, 7]):
        assert torch.allclose(of_ranks, want, atol=1e-3) and torch.equal(alone, want)


# -- controls: what the tests above would see -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["bias", "padding", "rows"])
def test_faults_are_found(fault, monkeypatch):
    """By the trial of ``parallelize``, and without it by the comparison with float64."""
    if fault == "bias":
        monkeypatch.setattr(
            split,
            "bias_of_own_rows",
            lambda compute, queries, keys, device=None, past_seen_tokens=0: compute(queries, _tokens(keys), device=device),
        )
    elif fault == "padding":
        dense = passes.dense
        monkeypatch.setattr(passes, "dense", lambda rule, queries, keys, visible, device: dense(rule, queries, keys, None, device))
    else:
        rows = passes.StackPass.rows.fget
        shift = lambda run: tuple(place + (run.counts is not None and run.group.rank == 0) for place in rows(run))  # noqa: E731
        monkeypatch.setattr(passes.StackPass, "rows", property(shift))
    model, inputs = encoder_decoder("T5"), {**source("T5"), "labels": targets()}
    with pytest.raises(kyklos.RequestError, match="T5ForConditionalGeneration does not compute the same when it is split"):
        on_ranks(model, 2, lambda *_: None, shares=[3, 7])
    results = on_ranks(model, 2, step(**inputs), shares=[3, 7], check=False)
    with pytest.raises(AssertionError):
        check(results, model, **inputs)


def _tokens(keys):
    running = passes.current()
    return keys if running.counts is None else running.tokens


# -- refused ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shares": "auto"}, 'shares="auto" of BartForConditionalGeneration'),
        ({"gather": "none"}, 'gather="none" of BartForConditionalGeneration'),
        ({"gather": "rank 0"}, 'use "auto" or "none"'),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, says):
    with pytest.raises(kyklos.RequestError, match=says):
        on_ranks(encoder_decoder("Bart"), 2, lambda *_: None, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 2}, "beam_search on a split model: use greedy search or sampling"),
        ({"cache_implementation": "static"}, "cache_implementation 'static' on a split model"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions of a split model"),
        ({"past_key_values": "static"}, "a cache of DynamicCache, StaticCache for T5ForConditionalGeneration, which is split"),
    ],
    ids=str,
)
def test_generation_of_other_kinds_is_refused(options, says):
    model, inputs = encoder_decoder("T5"), source("T5")
    want = greedy(model, **inputs)

    def work(model, handle, group):
        static = transformers.StaticCache(config=model.config, max_cache_len=32)
        pair = transformers.EncoderDecoderCache(transformers.DynamicCache(), static)
        given = {name: pair if value == "static" and name == "past_key_values" else value for name, value in options.items()}
        with pytest.raises(kyklos.RequestError, match=says):
            model.generate(**inputs, max_new_tokens=4, do_sample=False, **given)
        with pytest.raises(kyklos.RequestError, match="its decoder takes the EncoderDecoderCache of transformers"):
            handle.cache()
        return greedy(model, **inputs)

    for got in on_ranks(model, 2, work):
        assert torch.equal(got, want)


def test_dropout_is_refused():
    for name, settings in (("T5", {"dropout_rate": 0.1}), ("Bart", {"dropout": 0.1}), ("Bart", {"decoder_layerdrop": 0.1})):

        def work(model, handle, group):
            model.train()
            with pytest.raises(kyklos.RequestError, match="dropout in a split model would differ between ranks"):
                model(**source("T5"), labels=targets())
            model.eval()
            return model(**source("T5"), labels=targets()).loss

        on_ranks(encoder_decoder(name, **settings), 2, work)


@pytest.mark.parametrize("what", ["input_ids", "labels", "decoder_input_ids", "encoder_outputs"])
def test_other_inputs_on_a_rank_are_an_error_on_all(what):
    model, inputs = encoder_decoder("Bart"), {**source("Bart"), "labels": targets()}

    def work(model, handle, group):
        own = dict(inputs)
        if group.rank == 1:
            other = {
                "input_ids": inputs["input_ids"].flip(0),
                "labels": targets().roll(1, 0),
                "decoder_input_ids": targets().clamp(min=3),
                "encoder_outputs": [torch.ones(2, 23, 64)],
            }
            own[what] = other[what]
        elif what == "encoder_outputs":
            own[what] = [torch.zeros(2, 23, 64)]
        with pytest.raises(kyklos.RequestError, match="label|other values of encoder_hidden_states"):
            model(**own)
        return model(**inputs).loss.detach()

    first, second = on_ranks(model, 2, work)
    assert torch.equal(first, second)


def test_other_encoder_decoders_are_refused_by_name():
    small = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertConfig(**small)
    pair = transformers.EncoderDecoderModel(transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, bert)).eval()
    with pytest.raises(kyklos.RequestError, match="BertLMHeadModel cannot be split over ranks: a trial pass ends with AttributeError"):
        on_ranks(pair, 2, lambda *_: None)
    part = {**small, "num_key_value_heads": 2, "head_dim": 16}
    gemma = transformers.T5GemmaForConditionalGeneration(transformers.T5GemmaConfig(encoder=part, decoder=part)).eval()
    with pytest.raises(kyklos.RequestError, match="T5GemmaEncoder cannot be split over ranks: its layers get more of each token"):
        on_ranks(gemma, 2, lambda *_: None)
