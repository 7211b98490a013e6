"""Private training with the Trainer of transformers: same arguments, checkpoints, metrics and callbacks."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from groupwise.atomic import write_text
from groupwise.errors import UserError
from groupwise.integrations import resume
from groupwise.integrations.arguments import SETTINGS, WATCHED, WATCHING, PrivacyArguments, check_arguments
from groupwise.integrations.losses import LossesOf, find_losses
from groupwise.privacy import NoiseSource
from groupwise.private import Private, make_private
from groupwise.private.arguments import STEPPED
from groupwise.private.data import choose_examples, length_of
from groupwise.training.model_card import TAGS, privacy_section

__all__ = ["PrivacyArguments", "PrivateTrainer"]
OVERRIDDEN = "create_scheduler and get_train_dataloader of a subclass must call those of PrivateTrainer (super())."


class PrivateTrainer(Trainer):
    """A `transformers.Trainer` that trains with `groupwise.make_private`.

    A step draws each example with probability B/N, B = per_device_train_batch_size · gradient_accumulation_steps, and
    reads the batch per_device_train_batch_size examples at a time. Drawing, clipping, noise, update and count happen
    inside of `training_step`, so no callback or hook sees a gradient without noise. An epoch is ⌈N/B⌉ steps.

    `log_history`, trackers and metrics get ``epsilon`` of the steps so far. The training loss has no noise and is
    called ``nonprivate/loss``. Callbacks get it, but it is not kept in `log_history` or checkpoints.

    Example:
        trainer = PrivateTrainer(model, args, privacy=PrivacyArguments(epsilon=8), train_dataset=data)
        trainer.train()

    Args:
        model, args, others: as `transformers.Trainer` has them.
        privacy: budget, clipping and noise; also as a dict, ``{"epsilon": 8}``.
        losses: (model, inputs of b examples) -> (b,) losses, where each depends on its own example alone. By default
            the model's own loss, if it is known: cross-entropy of ``labels`` for classification, decoders and
            encoder-decoders (-100 predicts nothing), losses for regression and for several labels at once, and that
            of spans in question answering.
        noise_source: by default with a new key from the operating system. Never use one key for two runs.

    Raises:
        UserError: `TrainingArguments` or others that cannot be private; what `make_private` refuses, at `train`.
    """

    _collate: Any = None
    private: Private | None = None
    """The private training. After `train` it is detached; `statement()` and `epsilon` still give what was spent."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        privacy: PrivacyArguments | Mapping[str, Any],
        losses: LossesOf | None = None,
        noise_source: NoiseSource | None = None,
        **others: Any,
    ) -> None:
        args, privacy = args or TrainingArguments("tmp_trainer"), PrivacyArguments.of(privacy)
        check_arguments(args)
        if privacy.secure_noise and noise_source is not None and not noise_source.secure:
            raise UserError(
                "secure_noise=True has no effect on a given noise_source: make that with secure=True, or leave it out."
            )
        if losses is not None and args.label_smoothing_factor:
            raise UserError("label_smoothing_factor has no effect on losses of your own: smooth in them instead.")
        if others.get("compute_loss_func") is not None or type(self).compute_loss is not Trainer.compute_loss:
            raise UserError(
                "compute_loss gives one loss for a whole batch, which cannot be clipped per example: give "
                "losses(model, inputs), which returns one loss per example."
            )
        super().__init__(model, args, **others)
        given = self.eval_dataset
        sets = list(given.values()) if isinstance(given, dict) else [] if given is None else [given]
        if any(getattr(each, "dataset", each) is self.train_dataset for each in sets):  # a Subset has a dataset
            raise UserError(
                "eval_dataset is the training set, so losses without noise would be logged, and might choose the "
                "checkpoint or the learning rate: give examples that are held out."
            )
        self.privacy, self._noise_source, self._given_losses = privacy, noise_source, losses
        self._folder = Path(str(self.args.output_dir))
        self._resuming = False

    # -- the data, and the plan --------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One empty batch for each microstep of the Trainer's loop: `training_step` draws its own batch."""
        if self.train_dataset is not None:
            length_of(self.train_dataset)
        loader = super().get_train_dataloader()
        self._data, self._collate = loader.dataset, loader.collate_fn
        size, accumulated = length_of(self._data), self.args.gradient_accumulation_steps
        turns = math.ceil(size / self._batch_size()) * accumulated
        return DataLoader(range(size), batch_sampler=[[]] * turns, collate_fn=dict)  # type: ignore[arg-type]

    def _batch_size(self) -> int:
        return self.args.train_batch_size * self.args.gradient_accumulation_steps

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """As the Trainer does; first makes the private training, since all that it needs is known here."""
        if self.is_in_train:
            self._begin(num_training_steps)
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.private is not None:
            kinds = {"model": type(self.model).__name__, "lr_scheduler": type(scheduler).__name__}
            self.private.settings |= kinds
        return scheduler

    def _begin(self, steps: int) -> None:
        if self._collate is None:
            raise UserError(OVERRIDDEN)
        model: Any = self.model
        model.train()  # as in training, so that the check sees the same model
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # without accelerate's wrapper
        losses = self._given_losses or find_losses(
            model,
            lambda rows: self._prepare_inputs(self._collate([self._data[row] for row in rows])),
            choose_examples(self._data, length_of(self._data)),
            tolerance=0.02 if any(p.element_size() < 4 for p in model.parameters()) else 1e-5,
            smoothing=self.args.label_smoothing_factor,
        )
        self.private = make_private(
            model,
            optimizer,
            self._data,
            lambda model, batch: losses(model, self._prepare_inputs(batch)),
            steps=steps,
            batch_size=self._batch_size(),
            microbatch=self.args.train_batch_size,
            collate_fn=self._collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            noise_source=self._noise_source or NoiseSource.fresh(self.privacy.secure_noise),
            **self.privacy.settings(),
        )
        names = (*SETTINGS, *(WATCHED if self.args.lr_scheduler_type in WATCHING else ()))
        self.private.settings |= {name: str(getattr(self.args, name)) for name in names}
        if not self._resuming:
            resume.keep_key(self._folder, self.private.core.noise)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: Any, **others: Any
    ) -> TrainOutput:
        """As the Trainer does. Afterwards the model is a plain model again, with the trained weights.

        Raises:
            UserError: this trainer has released steps that this call does not resume, or the folder has an unfinished
                training.
        """
        self._resuming = bool(resume_from_checkpoint)
        checkpoint = str(resume.find(self._folder, resume_from_checkpoint)) if resume_from_checkpoint else None
        if checkpoint is None:
            if released := 0 if self.private is None else self.private.executed:
                raise UserError(
                    f"{released} steps were released, and training again would spend another epsilon: resume with "
                    "resume_from_checkpoint=True, or make a new PrivateTrainer with a new model to start over."
                )
            resume.check_new(self._folder)
        try:
            output = super().train(checkpoint, *args, **others)
            if self.private is not None and self.private.executed == self.private.plan.steps:
                resume.key_path(self._folder).unlink(missing_ok=True)
            return output
        except BaseException:
            if self._resuming and self.model is not None:  # may have the weights of the checkpoint
                STEPPED.update(self.model.modules())
            raise
        finally:
            self.is_in_train = False
            self.accelerator.gradient_state._set_sync_gradients(True)  # one state for all that accelerate prepares
            if self.private is not None:
                self.private.detach()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One private step, from drawing to update, at the last microstep; the others do nothing.

        Returns:
            The mean loss of the drawn examples, (); not private.
        """
        if self.private is None:
            raise UserError(OVERRIDDEN)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        step = self.private.step()
        # The update is done. The Trainer's loop calls accelerate's optimiser next, which does nothing as long as
        # gradients are not in sync.
        self.accelerator.gradient_state._set_sync_gradients(False)
        return torch.tensor(step.nonprivate["loss"], device=self.args.device)

    def _run_epoch(self, **given: Any) -> None:  # type: ignore[override]
        """As the Trainer does, unless all steps were taken before the run ended."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**given)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """0, because the true number would reveal the lengths of the drawn examples."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the Trainer does, with ``epsilon``; losses on training data become ``nonprivate/...``.

        Only callbacks get those. They are not kept in `log_history`, which is part of checkpoints.
        """
        for name in ("loss", "train_loss"):
            if (value := logs.pop(name, None)) is not None and not self.args.push_to_hub:  # with the trackers' files
                logs[f"nonprivate/{name}"] = value
        if self.private is not None:
            logs["epsilon"] = self.private.epsilon
        super().log(logs, start_time)
        kept = self.state.log_history[-1]
        self.state.log_history[-1] = {name: kept[name] for name in kept if not name.startswith("nonprivate/")}

    def create_model_card(
        self, language: str | None = None, license: str | None = None, tags: Any = None, *args: Any, **others: Any
    ) -> None:
        """As the Trainer does, with a section and tags on privacy; `push_to_hub` calls this too."""
        if self.private is None or not self.private.executed:
            return super().create_model_card(language, license, tags, *args, **others)
        plan, secret = self.private.plan, self.private.core.noise.is_secret
        said = {**plan.to_dict(), "private": plan.is_private and secret}  # the plan's ε, as results may have stopped it
        known = [tags] if isinstance(tags, str) else tags or []
        super().create_model_card(language, license, [*known, *(TAGS if said["private"] else ())], *args, **others)
        path = self._folder / "README.md"
        unnamed = re.compile(r"\| +\|\n\|:")  # the Trainer leaves the column of ε without a name
        text = unnamed.sub("| Epsilon |\n|:", path.read_text(encoding="utf-8"))
        write_text(path, f"{text.rstrip()}\n\n{privacy_section(said)}")

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.private is not None:
            resume.save(Path(output_dir), self.private)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.private is None:
            return
        super()._load_optimizer_and_scheduler(checkpoint)
        resume.load(Path(checkpoint), self.private)
