"""Trainer of transformers over ranks that are processes, against one process."""

import json
import textwrap

import pytest
import transformers
from processes import finish, start
from tiny_models import build

import kyklos
import kyklos.transformers

# Weights after six steps of clipped SGD on accumulated gradients, the losses, and that of an evaluation.
_TRAIN = textwrap.dedent("""
    import os, tempfile, warnings, logging, threading
    warnings.simplefilter("ignore"); logging.disable(30)
    import torch, transformers
    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = lambda: False
    import kyklos.transformers
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                      initializer_range=0.2, pad_token_id=0)

    def data(count, seed):
        make = torch.Generator().manual_seed(seed)
        texts = torch.randint(3, 97, (count, 33), generator=make)
        return [{"input_ids": text, "labels": text.masked_fill(torch.rand(33, generator=make) < 0.2, -100)} for text in texts]

    def trained(split):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        args = transformers.TrainingArguments(
            output_dir=FOLDER, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6, learning_rate=0.5, optim="sgd",
            lr_scheduler_type="linear", max_grad_norm=0.5, use_cpu=True, report_to=[], save_steps=6, logging_steps=1, disable_tqdm=True, seed=3,
            prediction_loss_only=True, per_device_eval_batch_size=4)
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data(24, 1), eval_dataset=data(5, 2))
        split(model, trainer)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        evaluated = trainer.evaluate()["eval_loss"]
        sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
        return {"losses": losses, "norms": norms, "evaluated": evaluated, "sums": sums, "saved": sorted(os.listdir(FOLDER))}
""")


@pytest.mark.parametrize("gather", ["auto", "none"])
def test_a_trainer_trains_as_in_one_process(gather, tmp_path):
    alone = f"FOLDER = {str(tmp_path / 'alone')!r}\n{_TRAIN}\nif True:\n    say(json.dumps(trained(lambda model, trainer: None)))\n    group.close()\n"
    over_ranks = f"""FOLDER = {str(tmp_path / "ranks")!r}\n{_TRAIN}
def split(model, trainer):
    kyklos.transformers.parallelize(model, group, shares=[1, 2], gather={gather!r}).prepare_trainer(trainer)
say(json.dumps(trained(split)))
group.close()
"""
    (alone_end,) = finish(start(alone), seconds=200)
    ends = finish(start(over_ranks, over_ranks), seconds=200)
    for out, err, code in [alone_end, *ends]:
        assert code == 0, f"{out}\n{err}"
    want, *got = (json.loads(out.strip().splitlines()[-1]) for out, _, _ in [alone_end, *ends])
    assert len(want["losses"]) == 6 and want["losses"][-1] != want["losses"][0] and max(want["norms"]) > 0.5
    for each in got:
        for name in ("losses", "norms", "evaluated", "sums"):
            assert each[name] == pytest.approx(want[name], rel=2e-4, abs=2e-3 if name == "sums" else 0), name
    # Rank 0 alone has saved.
    assert got[0]["saved"] == want["saved"] == ["checkpoint-6"]


def test_trainers_that_do_not_fit_are_refused(monkeypatch, tmp_path):
    models = [build("llama") for _ in range(2)]
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    own, other = (transformers.Trainer(model=model, args=args) for model in models)
    with kyklos.Group.local(1, device="cpu")[0] as group, kyklos.transformers.parallelize(models[0], group) as handle:
        with pytest.raises(kyklos.RequestError, match="of another model"):
            handle.prepare_trainer(other)
        with pytest.raises(kyklos.RequestError, match="is no Trainer"):
            handle.prepare_trainer(models[0])
        own.args.load_best_model_at_end = True
        with pytest.raises(kyklos.RequestError, match="choose among the checkpoints of rank 0"):
            handle.prepare_trainer(own)
        own.args.load_best_model_at_end = False
        handle.prepare_trainer(own)
        with pytest.raises(kyklos.RequestError, match="prepared already"):
            handle.prepare_trainer(own)
        handle.remove()
        assert "training_step" not in own.__dict__ and "prediction_step" not in own.__dict__
        handle = kyklos.transformers.parallelize(models[0], group)
        monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
        with pytest.raises(kyklos.RequestError, match="CUDA_VISIBLE_DEVICES"):
            handle.prepare_trainer(own)
        monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
        with pytest.raises(kyklos.RequestError, match="kyklos launch"):
            handle.prepare_trainer(own)
