"""Text generation with a causal model: E2E and DART (tables to text), SAMSum (summaries); section 5.3.

Only the target's tokens and the end of text count in the loss, as in Li & Liang (2021) and Li et al. (2022).
`samples.py` joins source and target in one sequence.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.config.schema import GenerateConfig, ModelConfig, RunConfig
from groupwise.data.synthetic_text import synthetic_paired
from groupwise.data.text import PAIRED
from groupwise.data.text_examples import PairedText, Request
from groupwise.errors import UserError
from groupwise.metrics import check_installed, corpus_bleu, e2e_rouge_l, rouge
from groupwise.models.language import load_causal, padding_token, position_limit
from groupwise.models.published import recorded
from groupwise.models.trainable import choose_trainable
from groupwise.tasks.beam_search import generate
from groupwise.tasks.samples import IGNORED, PairEncoder, Samples, demonstrations, in_context_prompt, pad, predictions
from groupwise.tasks.text_task import (
    TextTask,
    batches_by_length,
    check_length,
    choose_data,
    describe,
    find_tokenizer,
    longest_first,
    per_example,
    token_losses,
)
from groupwise.training.task import Feed, Microbatch, Split, fill, rounded, row_weights, to_device

SUMMARIES = ("samsum",)
"""Tasks whose texts are scored as summaries; the others are scored as in the E2E challenge."""
Write = Callable[[Any, list[list[int]], GenerateConfig], list[str]]
"""(tokeniser, prompts, settings) -> texts, such as `beam_search.generate` with its model."""
DELIMITER = "\nTL;DR"
"""The last line of a source that is to be summarised (appendix C.2)."""


class TextGeneration(TextTask):
    """Cross-entropy of each target given its source, perplexity, and finally beam search on the test set."""

    splits = ("valid", "test")
    headline = "perplexity"

    def __init__(
        self, config: RunConfig, model: nn.Module, tokenizer: Any, data: PairedText, encoder: PairEncoder
    ) -> None:
        self._samples: dict[Split, Samples] = {
            "train": encoder.pairs(data.train),
            "valid": encoder.pairs(_pairs(data.valid)),
            "test": encoder.pairs(_pairs(data.test)),
        }
        super().__init__(config, model, tokenizer, self._samples["train"], _describe(config, data, self._samples))
        self._task, self._token_loss, self._generate = config.task, config.train.token_loss, config.eval.generate
        self._data, self._encoder, self._max_length = data, encoder, config.data.max_length
        self._context = position_limit(model) - self._generate.max_new_tokens  # tokens that a prompt may have
        self._outputs: list[dict[str, Any]] = []

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Mean (or sum) over each example's own target tokens, (n,)."""
        return per_example(self._token_losses(model, batch), batch["labels"], self._token_loss)

    def feed(self, split: Split, device: torch.device) -> Feed:
        """Microbatches of a split for a pipeline."""
        return TextFeed(self._samples[split], padding_token(self.model), self._max_length, device)

    def evaluate(
        self, split: Split, batch_size: int, limit: int | None = None, final: bool = False
    ) -> dict[str, float]:
        """{"loss": mean over pairs of source and reference, "nll": nats per token, "perplexity": exp of that}.

        `final` on the test set adds the scores of generated texts, in percent: {"bleu", "rougeL"} for E2E and DART,
        {"rouge1", "rouge2", "rougeL"} for SAMSum.
        """
        samples = self._samples[split]
        batches = list(batches_by_length(samples.lengths[: limit or None], batch_size))
        found = []
        for rows in batches:
            read = self._read(samples, rows)
            losses = self._token_losses(self.model, read).double()
            found.append(per_example(losses, read["labels"], self._token_loss).cpu())
        write = partial(generate, self.model, device=self.device) if final else None
        return self.metrics(split, np.concatenate(batches), torch.cat(found), write)

    def metrics(self, split: Split, rows: np.ndarray, outcomes: Tensor, write: Write | None = None) -> dict[str, float]:
        """The metrics of `evaluate` from the losses of examples, which a pipeline computes itself.

        Args:
            rows: the examples' numbers, (n,).
            outcomes: their losses, the mean or sum over their own target tokens as in training, (n,).
            write: generates texts for a final evaluation; None for others.
        """
        losses, lengths = outcomes.double(), torch.from_numpy(self._samples[split].target_lengths[rows])
        totals = losses if self._token_loss == "sum" else losses * lengths
        nll = totals.sum() / lengths.sum()
        found = {"loss": float(losses.mean()), "nll": float(nll), "perplexity": float(nll.exp())}
        if write is None or split != "test":
            return found
        requests = self._requests()
        prompts = self._encoder.prompts([request.source for request in requests], self._context)
        return found | self._score(requests, prompts, write)

    def evaluate_in_context(self, shots: int, prompt_set: int) -> dict[str, float]:
        """Scores, as in `evaluate`, of texts generated from `shots` training examples and a test input.

        Not private: the prompt contains these examples. A demonstration takes at most 1 / (shots + 1) of the prompt's
        length. An input that is too long is truncated as in training.

        Raises:
            UserError: too few training examples that are short enough.
        """
        share = self._context // (shots + 1)
        shown = demonstrations(self._data.train, shots, prompt_set, lambda text: self._encoder.count(text) <= share)
        requests = self._requests()
        texts = [in_context_prompt(shown, request.source) for request in requests]
        prompts = self._encoder.in_context(texts, self._context)
        return self._score(requests, prompts, partial(generate, self.model, device=self.device))

    def outputs(self) -> dict[str, list[dict[str, Any]]]:
        """{"test": [{"source", "output", "references"}, ...]} of the last generation, one entry per input."""
        return {"test": self._outputs} if self._outputs else {}

    def _requests(self) -> list[Request]:
        return self._data.test[: self._generate.limit]

    def _score(self, requests: Sequence[Request], prompts: list[list[int]], write: Write) -> dict[str, float]:
        """Generate and keep a text for each prompt; returns the scores against the references."""
        if not requests:
            return {}
        with self.precision():
            texts = write(self.tokenizer, prompts, self._generate)
        self._outputs = [
            {"source": request.source, "output": text, "references": list(request.references)}
            for request, text in zip(requests, texts, strict=True)
        ]
        references = [request.references for request in requests]
        if self._task in SUMMARIES:
            return rouge(texts, references)
        return {"bleu": corpus_bleu(texts, references), "rougeL": e2e_rouge_l(texts, references)}

    def _read(self, samples: Samples, rows: Sequence[int] | np.ndarray, even: bool = False) -> dict[str, Any]:
        """As `read`, with "labels" (n, P) of the last P tokens, `IGNORED` outside of targets; `even` rounds P up."""
        tokens = [samples.tokens[i] for i in rows]
        starts = samples.starts[np.asarray(rows)]
        length = self.even_length(tokens) if even else max(len(row) for row in tokens)
        first = int(starts.min())
        if even:
            first = length - rounded(length - first, length - 1)  # nothing predicts the first token
        own = (np.arange(len(row)) >= start for row, start in zip(tokens, starts, strict=True))
        labelled = [np.where(mask, row, IGNORED)[first:] for mask, row in zip(own, tokens, strict=True)]
        labels = to_device(pad(labelled, IGNORED, length - first), self.device)
        return self.inputs(tokens, self.device, length=length) | {"labels": labels}

    def _token_losses(self, model: nn.Module, read: dict[str, Any]) -> Tensor:
        """Losses of the last P tokens, (n, P), where the earliest target begins.

        The last P positions are sliced, not gathered row by row, so that the batch axis is easy to trace. For sequences
        of similar length this costs hardly more.
        """
        labels = read["labels"]
        kept = labels.shape[1] + 1  # the last position predicts nothing
        limited = {"logits_to_keep": kept} if "logits_to_keep" in self.inputs.accepts else {}
        return token_losses(self.logits(model, read | limited)[:, -kept:-1], labels)


class TextFeed:
    """Microbatches of sources and targets, padded on the right; see `training.task.Feed`.

    T is the longest length in the logical batch, and P the largest number of target tokens. Both are rounded up to a
    multiple of 8, at most `max_length`.

    Args:
        pad_token: the token at padding; any token gives the same result.
    """

    def __init__(self, samples: Samples, pad_token: int, max_length: int, device: torch.device) -> None:
        self._samples, self._pad_token, self._most, self._device = samples, pad_token, max_length, device

    def __len__(self) -> int:
        return len(self._samples)

    def order(self, examples: np.ndarray) -> np.ndarray:
        """Longest first."""
        return examples[longest_first(self._samples.lengths[examples])]

    def microbatches(self, examples: np.ndarray, size: int, least: int = 1) -> list[Microbatch]:
        """See `Feed`; positions and labels (b, P) are those of `predictions`."""
        if not len(examples):
            return []
        length = rounded(int(self._samples.lengths[examples].max()), self._most)
        places = rounded(int(self._samples.target_lengths[examples].max()), self._most)
        filled = fill(examples, size, least)
        return [self._microbatch(rows, absent, length, places) for rows, absent in filled]

    def _microbatch(self, rows: np.ndarray, absent: int, length: int, most: int) -> Microbatch:
        tokens = [self._samples.tokens[i] for i in rows]
        places, labels = predictions(tokens, self._samples.starts[rows], most)
        columns = torch.arange(length).expand(len(rows), length)
        made = {
            "attention_mask": (columns < torch.tensor([[len(row)] for row in tokens])).long(),
            "position_ids": columns.clone(),
            "places": places,
            "labels": labels,
            "weights": row_weights(len(rows), absent),
        }
        return Microbatch(
            to_device(pad(tokens, self._pad_token, length), self._device),
            {name: to_device(value, self._device) for name, value in made.items()},
            absent,
        )


def make_text_generation(
    config: RunConfig, device: torch.device, build: Callable[[ModelConfig, Any], nn.Module] | None = None
) -> TextGeneration:
    """`task=e2e|dart|samsum` on files, or on synthetic pairs (`data.name=synthetic`).

    `build` makes the model from its settings and the tokeniser, and freezes parameters; None loads it to `device`.
    """
    check_installed()
    tokenizer = find_tokenizer(config)
    delimiter = DELIMITER if config.task in SUMMARIES else ""
    encoder = PairEncoder(tokenizer, delimiter, config.data.max_length)
    data = choose_data(config, lambda root: PAIRED[config.task](root, config.data.train_file), synthetic_paired)
    public_text(config, data)  # raises before a model is loaded
    if build is None:
        model = choose_trainable(load_causal(config.model, tokenizer), config.model).to(device)
    else:
        model = build(config.model, tokenizer)
    check_length(config.data.max_length, encoder.around + 2, model)
    new, most = config.eval.generate.max_new_tokens, position_limit(model)
    if config.eval.generate.limit != 0 and new + encoder.around >= most:
        raise UserError(
            f"eval.generate.max_new_tokens={new} leaves no room for a source in the model's {most} positions: lower it."
        )
    return TextGeneration(config, model, tokenizer, data, encoder)


def _pairs(requests: Sequence[Request]) -> list[tuple[str, str]]:
    return [(request.source, reference) for request in requests for reference in request.references]


def _describe(config: RunConfig, data: PairedText, samples: dict[Split, Samples]) -> dict[str, Any]:
    found = describe(config, data, samples["train"])
    inputs: dict[Split, int] = {"valid": len(data.valid), "test": len(data.test)}
    for split, count in inputs.items():
        part = samples[split]
        found |= {f"{split}_examples": len(part), f"{split}_inputs": count, f"cut_examples_{split}": part.cut}
    if text := public_text(config, data):
        found["public_text"] = text
    return found


PROVENANCE, RECORD = "provenance.json", "vocabulary.json"
"""Records in the folder of weights and tokeniser. They list the SHA-256 of the public files these were made from."""


def public_text(config: RunConfig, data: PairedText) -> str:
    """A phrase that names the public files that weights and tokeniser were made from; empty without a record.

    Raises:
        UserError: a training file that this run claims to protect is among the public files; a broken record.
    """
    weights = None if config.model.fresh or config.model.weights is not None else config.model.source
    vocabulary = config.model.tokenizer or config.model.source
    found = {
        "vocabulary": recorded(vocabulary, RECORD, "sha256", kind=dict),
        "weights": recorded(weights, PROVENANCE, "data", "sha256", kind=dict),
    }
    secret = next(iter(data.sha256.values()))  # of the training file
    for part, files in found.items():
        for name in (name for name, digest in files.items() if digest == secret and config.clip.grouping != "none"):
            raise UserError(
                f"The {part} of model.source={config.model.source} come from {name}, which this run should "
                "protect: start from weights of other public text (model.source), or from random weights "
                "(model.fresh=true) with another model.tokenizer."
            )
    lines = [f"{part} from {', '.join(Path(name).name for name in files)}" for part, files in found.items() if files]
    return "; ".join(lines)
