"""Pretrains on public text, masked or causal, in the same training loop without privacy.

The private fine-tuning of `scale=mini` starts from these weights, so the text must be public.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.config.schema import RunConfig
from groupwise.data.text import Corpus, read_corpus
from groupwise.errors import UserError
from groupwise.models.language import load_causal, load_masked
from groupwise.tasks.samples import IGNORED
from groupwise.tasks.text_task import check_length, find_tokenizer, save_network
from groupwise.training.from_config import autocast
from groupwise.training.task import Split, Task, eval_mode, row_numbers

MASKED = 0.3
"""The share of tokens that are to be predicted: more than RoBERTa's 15 %, as a short training learns more from it. Of
these 80 % are hidden and 10 % replaced by another."""
VALID = 0.02
"""The share of the documents that is kept for validation, and at most this many chunks of them."""
MOST_VALID = 256
SEPARATOR = ":"
"""Stands between the paths of `data.corpus`."""


class Pretraining(Task):
    """Chunks of T tokens (N, T); the loss of a chunk is the mean over its predicted tokens."""

    exports = True
    headline = "perplexity"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        masked: bool,
        chunks: dict[Split, Tensor],
        description: dict[str, Any],
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.model: Any = model  # of transformers
        self.tokenizer, self.masked = tokenizer, masked
        self.train_size = len(chunks["train"])
        self._chunks, self._description, self._precision = chunks, description, precision

    def read(self, examples: Sequence[int] | np.ndarray, even: bool = False) -> Tensor:
        """Token ids, (n, T)."""
        chunks = self._chunks["train"]
        return chunks[row_numbers(examples, chunks.device)]

    def losses(self, model: Any, batch: Tensor) -> Tensor:
        """Mean cross-entropy over the predicted tokens of each chunk, (n,)."""
        inputs, labels = self._mask(batch) if self.masked else (batch[:, :-1], batch[:, 1:])
        places = labels.ne(IGNORED)
        with self._precision():
            hidden = model.base_model(inputs).last_hidden_state
            logits = model.lm_head(hidden[places]).float()  # of the tokens to be predicted only
        losses = torch.zeros_like(places, dtype=torch.float32)
        losses[places] = F.cross_entropy(logits, labels[places], reduction="none")
        return losses.sum(1) / places.sum(1).clamp_min(1)

    @torch.no_grad()
    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """{"loss": nats a predicted token, "perplexity"}; the same tokens are masked each time."""
        chunks = self._chunks[split][:limit]
        with eval_mode(self.model), torch.random.fork_rng(devices=[chunks.device] if chunks.is_cuda else []):
            torch.manual_seed(0)
            losses = torch.cat([self.losses(self.model, part) for part in chunks.split(batch_size)])
        loss = float(losses.double().mean())
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def describe_data(self) -> dict[str, Any]:
        """Source, counts and SHA-256 of the files."""
        return self._description

    def export(self, folder: Path, provenance: dict[str, Any]) -> None:
        """A transformers folder with half-precision weights."""
        save_network(self.model, self.tokenizer, folder, provenance, dtype=torch.float16)

    def _mask(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs with some tokens hidden, and the labels: those tokens, `IGNORED` elsewhere."""
        draw = torch.rand(ids.shape, device=ids.device)
        labels = torch.where(draw < MASKED, ids, IGNORED)
        inputs = torch.where(draw < 0.8 * MASKED, self.tokenizer.mask_token_id, ids)
        others = torch.randint_like(ids, len(self.tokenizer))
        replaced = (draw >= 0.8 * MASKED) & (draw < 0.9 * MASKED)
        return torch.where(replaced, others, inputs), labels


def make_pretraining(config: RunConfig, device: torch.device) -> Pretraining:
    """`task=pretrain_masked` or `task=pretrain_causal` on the text files of `data.corpus`."""
    if config.clip.grouping != "none":
        raise UserError(f"task={config.task} trains on public text, without privacy: add clip=none.")
    masked = config.task == "pretrain_masked"
    tokenizer = find_tokenizer(config)
    model = (load_masked if masked else load_causal)(config.model, tokenizer).to(device)
    if not hasattr(model, "lm_head"):
        raise UserError(f"model.name={config.model.name} has no lm_head: pretrain a model like RoBERTa or GPT-2.")
    corpus = read_corpus(corpus_paths(config), tokenizer.eos_token)
    length = config.data.max_length
    check_length(length, 8, model)
    valid_count = max(1, round(VALID * len(corpus.documents)))
    shuffled = [corpus.documents[i] for i in np.random.default_rng(0).permutation(len(corpus.documents))]
    chunks: dict[Split, Tensor] = {
        "valid": _chunk(shuffled[:valid_count], tokenizer, masked, length, MOST_VALID).to(device),
        "train": _chunk(shuffled[valid_count:], tokenizer, masked, length, config.data.train_limit).to(device),
    }
    if not all(len(part) for part in chunks.values()):
        raise UserError(
            f"{corpus.source} hold too little for chunks of {length} tokens: give more, or less max_length."
        )
    return Pretraining(
        model, tokenizer, masked, chunks, _describe(corpus, chunks), autocast(config.train.precision, device)
    )


def corpus_paths(config: RunConfig) -> list[Path]:
    """The files and folders of `data.corpus`, looked for in the working folder and then below `paths.data`."""
    root = Path(config.paths.data).expanduser()
    named = [Path(name).expanduser() for name in (config.data.corpus or str(root / "corpus")).split(SEPARATOR)]
    return [path if path.exists() else root / path for path in named]


def _chunk(documents: Sequence[str], tokenizer: Any, masked: bool, length: int, limit: int | None) -> Tensor:
    """The documents' tokens, an end between them, in rows of `length`; no more text than `limit` rows need is read."""
    end = tokenizer.eos_token_id
    body = length - 2 if masked else length
    ids: list[int] = []
    for start in range(0, len(documents), 256):
        if limit is not None and len(ids) >= limit * body:
            break
        for document in tokenizer(list(documents[start : start + 256]), add_special_tokens=False).input_ids:
            ids += [*document, end]
    rows = torch.tensor(ids[: len(ids) // body * body], dtype=torch.long).view(-1, body)[:limit]
    if masked:
        rows = F.pad(F.pad(rows, (1, 0), value=tokenizer.bos_token_id), (0, 1), value=end)
    return rows


def _describe(corpus: Corpus, chunks: dict[Split, Tensor]) -> dict[str, Any]:
    return {
        "source": corpus.source,
        "sha256": corpus.sha256,
        "documents": len(corpus.documents),
        "train_examples": len(chunks["train"]),
        "valid_examples": len(chunks["valid"]),
        "tokens_each": chunks["train"].shape[1],
    }
