"""Text classification: SST-2, QNLI, QQP and MNLI with an encoder such as RoBERTa (section 5.2, appendix A.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.config.schema import RunConfig
from groupwise.data.glue import load_glue
from groupwise.data.synthetic_text import synthetic_labelled
from groupwise.data.text_examples import Labelled, LabelledText
from groupwise.errors import UserError
from groupwise.models.language import load_classifier
from groupwise.models.trainable import choose_trainable
from groupwise.tasks.samples import CHUNK, TokenRows
from groupwise.tasks.text_task import TextTask, batches_by_length, check_length, choose_data, describe, find_tokenizer
from groupwise.training.task import Split, to_device


@dataclass(frozen=True)
class Examples(TokenRows):
    """n texts as tokens, with token types if the tokeniser makes them, and labels (n,)."""

    types: list[np.ndarray]
    labels: np.ndarray


class TextClassification(TextTask):
    """Cross-entropy of each text, and accuracy on one or more validation sets."""

    _train: Examples

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        tokenizer: Any,
        train: Examples,
        valid: dict[str, Examples],
        description: dict[str, Any],
    ) -> None:
        super().__init__(config, model, tokenizer, train, description)
        self._valid = valid

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Cross-entropy of each example, (n,)."""
        return self._losses(model, batch)[0]

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """{"accuracy": percent, "loss": mean cross-entropy}, and for MNLI "accuracy_mismatched", "loss_mismatched"."""
        found: dict[str, float] = {}
        for name, part in {"": self._train}.items() if split == "train" else self._valid.items():
            correct, total, count = 0, 0.0, min(limit or len(part), len(part))
            for rows in batches_by_length(part.lengths[:count], batch_size):
                losses, logits = self._losses(self.model, self._read(part, rows))
                correct += int((logits.argmax(1).cpu().numpy() == part.labels[rows]).sum())
                total += float(losses.double().sum())
            ending = f"_{name}" if name else ""
            found |= {f"accuracy{ending}": 100.0 * correct / count, f"loss{ending}": total / count}
        return found

    def _read(self, part: Examples, rows: Sequence[int] | np.ndarray, even: bool = False) -> dict[str, Any]:
        """As `read`, with "labels" (n,)."""
        tokens = [part.tokens[i] for i in rows]
        types = [part.types[i] for i in rows] if part.types else None
        labels = to_device(part.labels[np.asarray(rows)], self.device)
        return self.inputs(tokens, self.device, types, self.even_length(tokens) if even else 0) | {"labels": labels}

    def _losses(self, model: nn.Module, read: dict[str, Any]) -> tuple[Tensor, Tensor]:
        logits = self.logits(model, read)
        return F.cross_entropy(logits, read["labels"], reduction="none"), logits


def make_text_classification(config: RunConfig, device: torch.device) -> TextClassification:
    """`task=sst2|qnli|qqp|mnli` on files, on the hub's copy, or on synthetic sentences (`data.name=synthetic`)."""
    tokenizer = find_tokenizer(config)
    data = choose_data(
        config,
        lambda root: load_glue(config.task, root, hub=config.data.hub, train_file=config.data.train_file),
        synthetic_labelled,
    )
    model = choose_trainable(load_classifier(config.model, data.classes, tokenizer), config.model).to(device)
    pairs = data.train.texts[0][1] is not None
    specials = tokenizer.num_special_tokens_to_add(pair=pairs)
    check_length(config.data.max_length, specials + 1 + pairs, model)
    train = encode(data.train, tokenizer, config.data.max_length)
    valid = {name: encode(part, tokenizer, config.data.max_length) for name, part in data.valid.items()}
    return TextClassification(config, model, tokenizer, train, valid, _describe(config, data, train, valid))


def encode(part: Labelled, tokenizer: Any, max_length: int) -> Examples:
    """Tokenise sentences or pairs with the model's special tokens.

    If a pair is too long, its longer text is truncated.
    """
    tokens: list[np.ndarray] = []
    types: list[np.ndarray] = []
    cut = 0
    for start in range(0, len(part), CHUNK):
        texts = part.texts[start : start + CHUNK]
        made = _tokenize(texts, tokenizer)
        long = [i for i, row in enumerate(made["input_ids"]) if len(row) > max_length]
        if long:
            shorter = _tokenize([texts[i] for i in long], tokenizer, truncation=True, max_length=max_length)
            for key, rows in shorter.items():
                for i, row in zip(long, rows, strict=True):
                    made[key][i] = row
        cut += len(long)
        tokens += [np.array(row, dtype=np.int32) for row in made["input_ids"]]
        types += [np.array(row, dtype=np.int32) for row in made.get("token_type_ids", [])]
    if not all(map(len, tokens)):
        raise UserError("A text of the data has no token of this tokeniser: remove empty texts, or give another model.")
    return Examples(tokens, cut, types, np.array(part.labels, dtype=np.int64))


def _tokenize(texts: Sequence[tuple[str, str | None]], tokenizer: Any, **options: Any) -> dict[str, list[list[int]]]:
    firsts, seconds = [first for first, _ in texts], [second for _, second in texts]
    parted = tokenizer.num_special_tokens_to_add(pair=True) > tokenizer.num_special_tokens_to_add(pair=False)
    between = "" if parted else "\n"  # GPT-2 and Qwen have no separator token
    both = (firsts,) if seconds[0] is None else (firsts, [f"{between}{second}" for second in seconds])
    return dict(tokenizer(*both, return_attention_mask=False, verbose=False, **options))


def _describe(config: RunConfig, data: LabelledText, train: Examples, valid: dict[str, Examples]) -> dict[str, Any]:
    found = describe(config, data, train)
    for name, part in valid.items():
        ending = f"_{name}" if name else ""
        found |= {f"valid_examples{ending}": len(part), f"cut_examples_valid{ending}": part.cut}
    return found | {"classes": list(data.classes)}
