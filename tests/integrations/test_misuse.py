"""Misuse of `PrivateTrainer` is refused in a sentence, or harmless."""

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.data import IterableDataset, Subset

from groupwise.errors import UserError
from groupwise.integrations.arguments import SUPPORTED, check_arguments
from groupwise.integrations.resume import key_path
from groupwise.integrations.transformers import PrivateTrainer
from tests.integrations.test_transformers import Kill, Killed, kill
from tests.integrations.tiny import Texts, arguments, collate, copy_run, encoder, privacy, trainer, weights

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def resume(folder: Path, **options) -> None:
    trainer(folder, **options).train(True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, finished) -> dict[str, Path]:
    """The folders of a killed run and of one that ended."""
    killed = tmp_path_factory.mktemp("killed")
    kill(killed)
    return {"killed": killed, "ended": Path(finished.args.output_dir)}


def own_loss(folder: Path) -> None:
    class Own(PrivateTrainer):
        def compute_loss(self, model, inputs, **others):
            return super().compute_loss(model, inputs, **others)

    Own(encoder(), arguments(folder), privacy=privacy())


def evaluated_on_the_training_set(folder: Path, within: Callable[[Texts], object] = lambda data: data) -> None:
    data = Texts()
    trainer(folder, train_dataset=data, eval_dataset=within(data))


def twice(folder: Path) -> None:
    run = trainer(folder, save_strategy="no", max_steps=1)
    run.train()
    run.train()


def other_optimizer(folder: Path) -> None:
    """Its state would be loaded from the checkpoint and look right."""
    model = encoder()
    groups = trainer(folder, model).create_optimizer().param_groups
    other = torch.optim.Adam([{"params": group["params"]} for group in groups], lr=0.1)
    trainer(folder, model, optimizers=(other, None)).train(True)


def no_optimizer_state(folder: Path) -> None:
    (folder / "checkpoint-3" / "optimizer.pt").unlink()
    resume(folder)


def some_weights_missing(folder: Path) -> None:
    path = folder / "checkpoint-3" / "model.safetensors"
    tensors = load_file(path)
    save_file(dict(list(tensors.items())[:-1]), path, {"format": "pt"})
    resume(folder)


def without_the_key(folder: Path) -> None:
    key_path(folder).unlink()
    resume(folder)


def only_the_model(folder: Path) -> None:
    kill(folder, save_only_model=True)
    resume(folder)


def mean_of_a_batch(model, inputs):
    return model(**inputs).loss


def mixed(model, inputs):
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    losses = F.cross_entropy(logits, inputs["labels"], reduction="none")
    return losses * losses.mean()


def without_labels(folder: Path) -> None:
    trainer(folder, data_collator=lambda rows: {k: v for k, v in collate(rows).items() if k != "labels"}).train()


def overridden(folder: Path, name: str, value: Any) -> None:
    run = trainer(folder)
    run.__class__ = type("Other", (type(run),), {name: lambda *_, **given: value})
    run.train()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Texts())


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "compute_loss_func, or compute_loss of one's own": (own_loss, "compute_loss gives one loss for a whole batch"),
    "losses that return a mean": (
        lambda f: trainer(f, losses=mean_of_a_batch).train(),
        "The loss must be one value per example",
    ),
    "losses that mix examples": (
        lambda f: trainer(f, losses=mixed).train(),
        "a layer or the loss mixes the examples of a batch",
    ),
    "no labels": (without_labels, "no integer 'labels'"),
    "secure_noise with a source that is not secure": (
        lambda f: trainer(f, budget=privacy(secure_noise=True)),
        "secure_noise=True has no effect on a given noise_source",
    ),
    "a dataset without numbered examples": (
        lambda f: trainer(f, train_dataset=Stream()).train(),
        "without __len__ or __getitem__",
    ),
    "neither epsilon nor noise_multiplier, or both": (
        lambda f: trainer(f, budget=privacy(epsilon=8.0)).train(),
        "give exactly one",
    ),
    "label smoothing of losses of one's own": (
        lambda f: trainer(f, losses=mixed, label_smoothing_factor=0.1),
        "label_smoothing_factor has no effect on losses of your own",
    ),
    **{
        f"{name} without super()": (partial(overridden, name=name, value=value), "must call those of PrivateTrainer")
        for name, value in {"create_scheduler": None, "get_train_dataloader": [{}] * 8}.items()
    },
    "the training set as eval_dataset": (evaluated_on_the_training_set, "eval_dataset is the training set"),
    "a part of the training set among several": (
        lambda f: evaluated_on_the_training_set(f, lambda data: {"dev": Texts(12), "train": Subset(data, range(4))}),
        "eval_dataset is the training set",
    ),
    "train() twice": (twice, "training again would spend another epsilon"),
    "resuming from save_only_model": (only_the_model, "is not a complete checkpoint of a private training"),
}
"""In an empty folder."""
AFTER_A_KILL: dict[str, tuple[Callable[[Path], object], str]] = {
    "train() where a killed run can go on": (lambda f: trainer(f).train(), "an unfinished private training"),
    "resuming with other settings": (
        lambda f: resume(f, weight_decay=0.1),
        "made with weight_decay=0.0, but here it is 0.1",
    ),
    "resuming with another optimizer": (other_optimizer, "made with optimizer=AdamW, but here it is Adam"),
    "resuming with another budget": (
        lambda f: resume(f, budget=privacy(threshold=2.0)),
        "made with threshold=1.0, but here it is 2.0",
    ),
    "resuming without the optimiser's state": (no_optimizer_state, "is not a complete checkpoint"),
    "resuming without some weights": (some_weights_missing, "did not restore all weights, so the same noise"),
    "resuming on other data": (lambda f: resume(f, train_dataset=Texts(48)), "was made with dataset_size="),
    "resuming without the key": (without_the_key, ".noise_key.pt: if the folder was moved, move the key"),
    "resuming where the folder was moved to": (
        lambda f: resume(f.rename(f / ".." / f"{f.name}-moved")),
        "-moved.noise_key.pt: if the folder was moved",
    ),
    "resuming into another folder, whose key would stay for good": (
        lambda f: trainer(f / "other").train(f / "checkpoint-3"),
        "is outside of output_dir",
    ),
}
AFTER_THE_END: dict[str, tuple[Callable[[Path], object], str]] = {
    "going back after the end": (
        lambda f: trainer(f).train(str(f / "checkpoint-3")),
        "A finished run cannot be resumed",
    ),
    "going on after the end": (resume, "A finished run cannot be resumed"),
}


@pytest.mark.parametrize("misuse", REFUSALS | AFTER_A_KILL | AFTER_THE_END)
def test_misuse_is_refused_in_a_sentence(tmp_path, misuse, folders):
    if misuse not in REFUSALS:
        copy_run(folders["killed" if misuse in AFTER_A_KILL else "ended"], tmp_path)
    do, words = (REFUSALS | AFTER_A_KILL | AFTER_THE_END)[misuse]
    with pytest.raises(UserError, match=re.escape(words)) as refusal:
        do(tmp_path)
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


ARGUMENTS = {
    "fp16": True,
    "torch_compile": True,
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0,
    "auto_find_batch_size": True,
    "dataloader_drop_last": True,
    "include_num_input_tokens_seen": "all",
    "enable_jit_checkpoint": True,
    "optim": "lomo",
    "train_sampling_strategy": "sequential",
}
"""Arguments that `TrainingArguments` accepts on a machine without a GPU."""
SAID = {"optim": "optim=lomo", "n_gpu": "set CUDA_VISIBLE_DEVICES=0", "world_size": "without torchrun"}


@pytest.mark.parametrize("name", SUPPORTED)
def test_an_argument_that_cannot_be_private_is_refused_by_name(tmp_path, name):
    args = arguments(tmp_path)
    if name in ARGUMENTS:
        try:
            args = arguments(tmp_path, **{name: ARGUMENTS[name]})
        except (ImportError, ValueError):  # by transformers, where this machine lacks something
            setattr(args, name, ARGUMENTS[name])
    elif name == "n_gpu":
        args._n_gpu = 2
    elif name == "world_size":
        args.distributed_state.num_processes = 2
    else:
        setattr(args, name, {"given": True})
    try:
        with pytest.raises(UserError, match=f"^{name}=") as refusal:
            check_arguments(args)
        assert SAID.get(name, "") in str(refusal.value)
    finally:
        args.distributed_state.num_processes = 1
    assert str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


@pytest.mark.parametrize("given", [1.0, 0.5])
def test_max_grad_norm_is_set_to_zero_with_a_warning_if_it_was_given(tmp_path, caplog, given, monkeypatch):
    logger = "groupwise.integrations.arguments"
    monkeypatch.setattr(logging.getLogger(logger), "disabled", False)  # Hydra may have set it in an earlier test
    with caplog.at_level("WARNING", logger):
        args = arguments(tmp_path, max_grad_norm=given)
        check_arguments(args)
    assert args.max_grad_norm == 0
    assert ("max_grad_norm=0.5 is set to 0" in caplog.text) == (given == 0.5)  # 1 is the default
    assert caplog.text.count("max_grad_norm") == (given == 0.5)


def test_a_failed_run_resumes_in_the_same_process(tmp_path, finished):
    run = trainer(tmp_path, callbacks=[Kill(5)])
    with pytest.raises(Killed):
        run.train()
    with pytest.raises(UserError, match="training again would spend another epsilon"):
        run.train()
    run.remove_callback(Kill)
    run.train(True)
    assert torch.equal(weights(run.model), weights(finished.model))


def test_a_refused_resume_counts_as_an_earlier_training(tmp_path, folders):
    copy_run(folders["killed"], tmp_path / "killed")
    refused = trainer(tmp_path / "killed", weight_decay=0.1)
    with pytest.raises(UserError, match="made with weight_decay="):
        refused.train(True)  # after the weights were loaded
    run = trainer(tmp_path / "other", refused.model)
    with pytest.warns(UserWarning, match="trained privately before"):
        run.train()
    assert "Not included: an earlier private training" in run.private.statement()


def test_untested_arguments_of_the_page_are_checked():
    page = " ".join(PAGE.read_text().split()).split("untested arguments")[1].split("`max_grad_norm`")[0]
    assert set(re.findall(r"`(\w+)`", page)) <= {*SUPPORTED}
