"""`PrivateTrainer` matches a loop with `make_private` bit for bit, resumes, and keeps its noise key in one file."""

import base64
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, TrainerCallback, TrainingArguments
from transformers.models.roberta import RobertaForSequenceClassification

from groupwise import make_private
from groupwise.errors import UserError
from groupwise.integrations.resume import STATE, key_path
from groupwise.integrations.transformers import PrivacyArguments
from groupwise.privacy import NoiseSource
from groupwise.training.checkpoint import load_checkpoint
from tests.integrations.tiny import SEED, VOCABULARY, Texts, collate, copy_run, encoder, privacy, trainer, weights


class Killed(Exception):
    """Stands for a signal that ends the process."""


class Losses(TrainerCallback):
    """Records the step at which a training began, and the steps whose losses are logged."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.at, self.logged = state.global_step, []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logged += [state.global_step] if "nonprivate/loss" in logs else []


class Kill(TrainerCallback):
    """Ends the training at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


def kill(folder: Path, *model, step: int = 5, **options) -> None:
    """A run with a checkpoint after every third step that ends after this step."""
    with pytest.raises(Killed):
        trainer(folder, *model, callbacks=[Kill(step)], **options).train()


def losses(model, inputs):
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    return F.cross_entropy(logits, inputs["labels"], reduction="none")


def test_the_trainer_matches_a_loop_with_make_private_bit_for_bit(tmp_path):
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (8 - step) / 8)
    data, settings = Texts(), {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"}
    source = NoiseSource.from_seed(SEED)
    how = {"collate_fn": collate, "microbatch": 4, "noise_source": source}
    private = make_private(model.train(), optimizer, data, losses, steps=8, batch_size=12, **how, **settings)
    for _ in private.steps(8):
        schedule.step()
    private.detach()
    run = trainer(tmp_path, optim="adamw_torch", save_strategy="no")
    output = run.train()
    assert output.global_step == run.private.executed == 8
    assert torch.equal(weights(run.model), weights(model))
    assert "forward" not in vars(run.model), "the model is detached"


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run that was killed before its eighth step, with two checkpoints."""
    folder = tmp_path_factory.mktemp("killed")
    kill(folder, step=7)
    return folder


@pytest.mark.parametrize("asked", [True, str, Path])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, finished, killed, asked):
    copy_run(killed, tmp_path / "killed")
    torch.manual_seed(99)
    resumed = trainer(tmp_path / "killed", noise_source=NoiseSource.from_seed(99))
    begun = Losses()
    resumed.add_callback(begun)
    output = resumed.train(asked if asked is True else asked(tmp_path / "killed" / "checkpoint-3"))
    assert begun.at == (6 if asked is True else 3)
    assert torch.equal(weights(resumed.model), weights(finished.model))
    thresholds = [run.private.core.thresholds.clip_thresholds for run in (resumed, finished)]
    assert torch.equal(*thresholds)
    assert output.metrics["epsilon"] == finished.private.epsilon
    lines = [[line for line in run.state.log_history if "grad_norm" in line] for run in (resumed, finished)]
    assert lines[0] == lines[1] and len(lines[0]) == 4


def test_a_run_that_ends_after_its_last_checkpoint_is_ended_without_another_step(tmp_path, finished):
    class KillAtTheEnd(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            raise Killed

    with pytest.raises(Killed):
        trainer(tmp_path, callbacks=[KillAtTheEnd()]).train()
    resumed = trainer(tmp_path)
    resumed.train(True)
    assert torch.equal(weights(resumed.model), weights(finished.model)) and not key_path(tmp_path).exists()


def test_an_incomplete_last_checkpoint_is_refused_and_an_earlier_one_resumes(tmp_path, finished, killed):
    copy_run(killed, tmp_path)
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    with pytest.raises(UserError, match=r"checkpoint-6 is not a complete checkpoint .* an earlier one"):
        trainer(tmp_path).train(True)
    resumed = trainer(tmp_path)
    resumed.train(str(tmp_path / "checkpoint-3"))
    assert torch.equal(weights(resumed.model), weights(finished.model))


def test_epsilon_is_in_logs_state_and_metrics_and_losses_go_to_callbacks_alone(tmp_path):
    evaluated = {"eval_dataset": Texts(12, seed=2), "eval_strategy": "steps", "eval_steps": 4}
    run = trainer(tmp_path, callbacks=[losses := Losses()], max_grad_norm=1.0, **evaluated)
    output = run.train()
    assert run.args.max_grad_norm == 0
    kept = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    plan = run.private.plan
    for line in kept:
        assert line["epsilon"] == pytest.approx(plan.spent(line["step"]).epsilon)
        assert not [name for name in line if "loss" in name and name != "eval_loss"], "a checkpoint may be published"
    assert losses.logged == [2, 4, 6, 8]
    assert {line["step"] for line in kept if "eval_loss" in line} == {4, 8}
    assert output.metrics["epsilon"] == plan.epsilon == run.private.epsilon
    assert output.metrics["nonprivate/train_loss"] == output.training_loss


def test_steps_and_batch_size_follow_the_training_arguments(tmp_path):
    run = trainer(tmp_path, max_steps=-1, num_train_epochs=1.5, save_strategy="no")
    run.train()
    plan = run.private.plan
    assert (plan.expected_batch_size, plan.steps) == (12, math.ceil(1.5 * 60 / 12))
    assert run.state.epoch == pytest.approx(plan.steps / 5)


class Watch(TrainerCallback):
    """Records the largest gradient that callbacks see in each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen.append(max(float(p.grad.abs().max()) for p in model.parameters()))

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        assert all(p.grad is None for p in model.parameters())


def test_no_callback_sees_a_gradient_without_noise(tmp_path):
    watch = Watch()
    run = trainer(tmp_path, callbacks=[watch], budget=privacy(noise_multiplier=1e4), save_strategy="no")
    run.train()
    least = run.private.plan.gradient_noise_multiplier / 12
    assert len(watch.seen) == 8 and min(watch.seen) > least, "each gradient shows the noise"


def secrets_in(folder: Path, key: bytes) -> list[str]:
    pickled = key.decode("latin1").encode()
    forms = [key, pickled, key.hex().encode(), base64.b64encode(key), repr(key).encode(), repr(list(key)).encode()]
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [str(file.relative_to(folder)) for file in files if any(form in file.read_bytes() for form in forms)]


class Uploads(TrainerCallback):
    """Searches the output folder for the key whenever the callbacks of Comet, DagsHub and DVCLive upload it."""

    def __init__(self, trainer) -> None:
        self.trainer, self.found = trainer, []

    def on_save(self, args, state, control, **kwargs):
        self.found.append(secrets_in(Path(args.output_dir), self.trainer.private.core.noise.key))

    on_train_end = on_save


def test_the_key_is_in_one_file_beside_the_folder_readable_by_its_owner_alone(tmp_path, caplog, capfd):
    folder = tmp_path / "out"
    run = trainer(folder, noise_source=None, callbacks=[Kill(7)], log_level="debug")
    with caplog.at_level("DEBUG"), pytest.raises(Killed):
        run.train()
    run.save_model()
    key = run.private.core.noise.key
    assert secrets_in(tmp_path, key) == ["out.noise_key.pt"] and key_path(folder) == tmp_path / "out.noise_key.pt"
    assert key_path(folder).stat().st_mode & 0o777 == 0o600
    assert (folder / "checkpoint-6" / STATE).stat().st_mode & 0o777 == 0o600
    assert "clip_plan" not in load_checkpoint(folder / "checkpoint-6" / STATE), "it has lengths of texts"
    assert key.hex() not in caplog.text + "".join(capfd.readouterr())
    resumed = trainer(folder, noise_source=None)
    resumed.add_callback(uploads := Uploads(resumed))
    resumed.train(True)
    assert uploads.found == [[], []], "at step 8 and at the end"
    assert resumed.private.core.noise.key == key
    assert secrets_in(tmp_path, key) == [], "the key of a run that is done is removed"


@pytest.mark.parametrize("spelt", [".", "../out", "../link", "inner/.."])
def test_the_key_is_outside_of_the_folder_for_every_spelling_of_its_path(tmp_path, monkeypatch, spelt):
    (tmp_path / "out" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("out")
    monkeypatch.chdir(tmp_path / "out")
    assert key_path(Path(spelt)) == tmp_path / "out.noise_key.pt"


def test_an_exported_model_is_loaded_back(tmp_path):
    run = trainer(tmp_path, save_strategy="no")
    run.train()
    run.save_model(str(tmp_path / "export"))
    loaded = RobertaForSequenceClassification.from_pretrained(tmp_path / "export")
    assert torch.equal(weights(loaded), weights(run.model))


class Sentences(Texts):
    """Texts for a causal model: the first three tokens are no targets."""

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        tokens = self.rows[row]
        return {"input_ids": tokens, "labels": [-100] * 3 + tokens[3:]}


def causal() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=20, n_embd=8, n_layer=1, n_head=1, pad_token_id=1)
    )


def test_a_step_of_a_causal_model_without_noise_matches_a_loop_over_examples(tmp_path):
    """The loss of an example is the mean over its targets, without those labelled -100."""
    plain, data = causal().double().eval(), Sentences()
    model = causal().double()
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    options = {"max_steps": 1, "save_strategy": "no"}
    budget = privacy(noise_multiplier=0.0, clip="flat", threshold=0.5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run = trainer(tmp_path, model, budget, train_dataset=data, optimizers=(sgd, None), **options | {"warmup_steps": 0})
    run.train()
    rows = run.private.core.sampler.indices(0)
    parameters = list(plain.parameters())
    sums, clipped = [torch.zeros_like(p) for p in parameters], 0
    for row in rows:
        tokens = torch.tensor(data.rows[row])
        loss = F.cross_entropy(plain(tokens[None]).logits[0, 2:-1], tokens[3:])
        gradients = torch.autograd.grad(loss, parameters)
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        clipped += norm > 0.5
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, 0.5 / norm)
    assert clipped > 0
    expected = torch.cat([(p - 0.1 * s / 12).flatten() for p, s in zip(parameters, sums, strict=True)])
    torch.testing.assert_close(weights(model), expected.detach(), rtol=1e-9, atol=1e-10)


def test_adapters_resume_to_the_same_bits(tmp_path):
    from peft import LoraConfig, get_peft_model

    def adapted():
        model = causal()
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))

    data = {"train_dataset": Sentences()}
    finished = trainer(tmp_path / "finished", adapted(), **data)
    finished.train()
    kill(tmp_path / "killed", adapted(), **data)
    resumed = trainer(tmp_path / "killed", adapted(), **data)
    resumed.train(True)
    assert torch.equal(weights(resumed.model), weights(finished.model))
    assert not torch.equal(weights(finished.model), weights(adapted()))


def test_bfloat16_trains_and_resumes_to_the_same_bits(tmp_path, finished):
    half = trainer(tmp_path / "half", bf16=True)
    half.train()
    kill(tmp_path / "killed", bf16=True)
    resumed = trainer(tmp_path / "killed", bf16=True)
    resumed.train(True)
    assert torch.equal(weights(resumed.model), weights(half.model))
    assert not torch.equal(weights(finished.model), weights(half.model)), "it does compute in bfloat16"


def test_the_command_line_reads_both_kinds_of_arguments(tmp_path):
    parser = HfArgumentParser((TrainingArguments, PrivacyArguments))
    words = ["--output_dir", str(tmp_path), "--epsilon", "8", "--clip", "flat", "--rescale", "False"]
    args, budget = parser.parse_args_into_dataclasses(words)
    assert isinstance(args, TrainingArguments)
    assert budget == PrivacyArguments(epsilon=8, clip="flat", rescale=False)
    assert all(text in parser.format_help() for text in ("--noise_multiplier", "--accountant", "--target_quantile"))


def test_a_run_that_died_before_its_first_checkpoint_starts_again_in_the_folder_of_a_finished_one(tmp_path, finished):
    copy_run(Path(finished.args.output_dir), tmp_path)
    kill(tmp_path, step=1, noise_source=NoiseSource.from_seed(8))
    again = trainer(tmp_path)
    again.train()
    assert torch.equal(weights(again.model), weights(finished.model))


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    kill(tmp_path / "one")
    kill(tmp_path / "two", noise_source=NoiseSource.from_seed(8))
    shutil.copytree(tmp_path / "one" / "checkpoint-3", tmp_path / "two" / "checkpoint-9")
    with pytest.raises(UserError, match=r"is the key of another run than .*checkpoint-9"):
        trainer(tmp_path / "two").train(True)
