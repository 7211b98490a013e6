"""A tiny encoder on made-up texts of tokens, and its private trainer, which the tests of this folder share."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForSequenceClassification, TrainingArguments

from groupwise.integrations.resume import key_path
from groupwise.integrations.transformers import PrivacyArguments, PrivateTrainer
from groupwise.privacy import NoiseSource

EXAMPLES, VOCABULARY, PADDING, SEED = 60, 50, 1, 5


class Texts(torch.utils.data.Dataset):
    """Texts of 4 to 11 tokens; the label says whether the first token is large."""

    def __init__(self, examples: int = EXAMPLES, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 12, (examples,), generator=generator).tolist()
        self.rows = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": self.rows[row], "labels": int(self.rows[row][0] > VOCABULARY // 2)}


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Right-padded tokens, their mask, and labels: of each text, or of each token."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (longest - len(values))

    labels = [row["labels"] for row in rows]
    return {
        "input_ids": torch.tensor([padded(row["input_ids"], PADDING) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([padded(of, -100) for of in labels] if isinstance(labels[0], list) else labels),
    }


def encoder(dropout: float = 0.1, **options: Any) -> RobertaForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = RobertaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=20, type_vocab_size=1, **sizes, **dropouts, **options
    )
    return RobertaForSequenceClassification(config)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Batches of 12 in microbatches of 4, 8 steps, a checkpoint after every third."""
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 8, "save_steps": 3}
    shown = {"logging_steps": 2, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(str(folder), **{**given, **shown, "learning_rate": 0.02, "max_grad_norm": 0.0, **options})


def privacy(**options: Any) -> PrivacyArguments:
    return PrivacyArguments(**{"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp", **options})


def trainer(
    folder: Path, model: nn.Module | None = None, budget: PrivacyArguments | None = None, **options: Any
) -> PrivateTrainer:
    """A trainer with a seeded key; options are those of `PrivateTrainer` or of `TrainingArguments`."""
    own = {"train_dataset": Texts(), "data_collator": collate, "noise_source": NoiseSource.from_seed(SEED)}
    names = (*own, "eval_dataset", "callbacks", "losses", "compute_metrics", "optimizers", "compute_loss_func")
    given = {name: options.pop(name) for name in names if name in options}
    return PrivateTrainer(
        model or encoder(), arguments(folder, **options), privacy=budget or privacy(), **{**own, **given}
    )


def copy_run(folder: Path, to: Path) -> None:
    """Copy what a run has written, and its key if there is one."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    if key_path(folder).exists():
        shutil.copy(key_path(folder), key_path(to))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
