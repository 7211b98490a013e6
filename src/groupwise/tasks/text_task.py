"""Implements what all text tasks share: order by length, token losses, the choice of data, and export."""

import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.atomic import write_json
from groupwise.config.checks import GENERATION, IMAGE_MODELS
from groupwise.config.schema import RunConfig
from groupwise.data.text_examples import Data, LabelledText, PairedText, hold_out, keep, sha256_of_files
from groupwise.errors import UserError
from groupwise.models.hub import load_tokenizer
from groupwise.models.language import MeanPooled, padding_token, position_limit
from groupwise.models.published import provenance_of
from groupwise.tasks.samples import IGNORED, ModelInputs, TokenRows
from groupwise.training.from_config import autocast
from groupwise.training.model_card import write_model_card
from groupwise.training.task import Task, rounded

ADAPTERS_ONLY = "This folder holds adapters: load them with peft's PeftModel.from_pretrained on top of the base model."


class TextTask(Task):
    """A task on a transformers model; subclasses add data, losses and metrics."""

    exports = True

    def __init__(
        self, config: RunConfig, model: nn.Module, tokenizer: Any, train: TokenRows, description: dict[str, Any]
    ) -> None:
        self.model = model.train()
        self.tokenizer = tokenizer
        self.train_size = len(train)
        self.device = next(model.parameters()).device
        self.inputs = ModelInputs(model, padding_token(model))
        self._train, self._description = train, description
        self.precision = autocast(config.train.precision, self.device)
        network = MeanPooled(model) if config.model.pool == "mean" else model
        self._network = torch.compile(network) if config.train.compile else network

    def read(self, examples: Sequence[int] | np.ndarray, even: bool = False) -> dict[str, Any]:
        """The model's inputs, (n, T) each, and "labels".

        T is the length of the longest text; `even` rounds it up to a multiple of 8.
        """
        return self._read(self._train, examples, even)

    @abstractmethod
    def _read(self, part: Any, rows: Sequence[int] | np.ndarray, even: bool = False) -> dict[str, Any]:
        """As `read`, for any part of the data."""

    def describe_data(self) -> dict[str, Any]:
        """Source and SHA-256 of the files, counts, lengths, and how many examples were truncated."""
        return self._description

    def order(self, examples: np.ndarray) -> np.ndarray:
        """Longest first, so that microbatches need little padding; examples of equal length keep their order."""
        return examples[longest_first(self._train.lengths[examples])]

    def export(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write weights, configuration and tokeniser as `save_pretrained` does, and provenance.json with their SHA-256.

        Of a model with adapters, only the adapters are written.

        Raises:
            UserError: the folder, which is created if it is missing, cannot be written.
        """
        model: Any = self.model
        try:
            folder.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(folder)
            # Otherwise tokenizer.json would reveal whether an example was too long.
            self.tokenizer.backend_tokenizer.no_truncation()
            self.tokenizer.backend_tokenizer.no_padding()
            vocabulary = Path(self.tokenizer.name_or_path) / "vocabulary.json"  # before the tokeniser gets another path
            if vocabulary.is_file():
                shutil.copy(vocabulary, folder)
            self.tokenizer.save_pretrained(folder)
            digests = sha256_of_files(sorted(folder.glob("*.safetensors")), folder)
            note = {"note": ADAPTERS_ONLY, "base": _base(model)} if hasattr(model, "peft_config") else {}
            write_json(folder / "provenance.json", {"sha256": digests, **note, **provenance})
            if "privacy" in provenance:
                write_model_card(folder, provenance)
        except OSError as error:
            raise UserError(f"export={folder} cannot be written ({error}): give another folder.") from error

    def even_length(self, tokens: Sequence[np.ndarray]) -> int:
        """The length of the longest row, rounded up to a multiple of 8, at most the model's positions."""
        return rounded(max(len(row) for row in tokens), position_limit(self.model))

    def logits(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The model's logits for what `read` gives, computed in the run's precision and returned in float32 or better.

        The task's own model runs compiled if `train.compile` is set.
        """
        network = self._network if model is self.model else model
        with self.precision():
            logits = network(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        return at_least_float32(logits)


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Indices from the longest to the shortest, (n,); equal lengths keep their order."""
    return np.argsort(-lengths, kind="stable")


def batches_by_length(lengths: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """All of 0 ... n - 1, `size` at a time, the longest first."""
    places = longest_first(lengths)
    for start in range(0, len(places), size):
        yield places[start : start + size]


def at_least_float32(logits: Tensor) -> Tensor:
    """bfloat16 to float32; float32 and float64 unchanged."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def token_losses(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each token, 0 where the label is `IGNORED`: (B, P, V), (B, P) -> (B, P)."""
    how: Any = {"ignore_index": IGNORED, "reduction": "none", "label_smoothing": smoothing}
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **how).view(labels.shape)


def per_example(losses: Tensor, labels: Tensor, token_loss: str) -> Tensor:
    """Mean or sum over each example's own labelled tokens: (B, P), (B, P) -> (B,)."""
    totals = losses.sum(1)
    return totals if token_loss == "sum" else totals / (labels != IGNORED).sum(1)


def find_tokenizer(config: RunConfig) -> Any:
    """The tokeniser of `model.tokenizer`, else of `model.source`; refuses an image network."""
    if config.model.name in IMAGE_MODELS:
        raise UserError(
            f"{config.model.name} cannot read text: choose model=roberta_base or gpt2 for task={config.task}."
        )
    name = config.model.tokenizer or config.model.source
    if name is None:
        raise UserError("There is no tokeniser: give model.tokenizer, or model.source, a folder or a name on the hub.")
    return load_tokenizer(name)


def check_length(max_length: int, least: int, model: nn.Module) -> None:
    """Refuse a `max_length` above the model's number of positions, or too short for any text."""
    most = position_limit(model)
    if max_length > most:
        raise UserError(f"data.max_length={max_length} is more than the {most} positions of the model: lower it.")
    if max_length < least:
        raise UserError(f"data.max_length={max_length} leaves no room for text: give at least {least}.")


def choose_data(config: RunConfig, from_files: Callable[[Path], Data], made_up: Callable[[str], Data]) -> Data:
    """The data of `data.name`, from files or synthetic, with `data.holdout` and `data.train_limit` applied."""
    settings = config.data
    if settings.name == "files":
        data = from_files(Path(config.paths.data).expanduser())
    elif settings.name == "synthetic":
        data = made_up(config.task)
    else:
        raise UserError(f"data.name={settings.name} is not known for text: choose files or synthetic.")
    if settings.holdout:
        data = hold_out(data, settings.holdout)
    return data if settings.train_limit is None else keep(data, settings.train_limit)


def describe(config: RunConfig, data: LabelledText | PairedText, train: TokenRows) -> dict[str, Any]:
    """The description of a text task's data for the record, without the counts of the evaluation sets."""
    if config.data.holdout:
        settings = f"valid, a share of {config.data.holdout:g} of the training set that is set aside"
    elif config.scale == "lite":
        settings = "the learning rate: a fifth of the training set that is set aside; the rest: as in the paper"
    elif config.scale == "mini" and config.task not in GENERATION:
        settings = "the learning rate and thresholds: a fifth of SST-2's training set; the rest: as in the paper"
    elif config.scale != "paper":
        settings = "the learning rate: ours, not searched; the rest: as in the paper"
    else:
        settings = "the paper's, found on a fifth of SST-2's training set (appendix A.2), where nothing else is given"
    made_up = {"generated": "made up by this program from a fixed seed; nobody's data"}
    return {
        "source": data.source,
        "sha256": data.sha256,
        "train_examples": len(train),
        "max_length": config.data.max_length,
        "longest": int(train.lengths.max()),
        "cut_examples": train.cut,
        "selected_on": f"settings: {settings}; weights: nothing, the last step's",
        **(made_up if config.data.name == "synthetic" else {}),
        **({} if config.model.fresh else provenance_of(config.model.source)),
    }


def _base(model: Any) -> str:
    name = model.get_base_model().name_or_path
    return name or "fresh weights, which are not here: only model.pt of the run holds them"
