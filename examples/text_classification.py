"""Classifies short texts privately with `PrivateTrainer`, in the place of transformers' Trainer.

    python examples/text_classification.py --output_dir out          made-up reviews at ε = 8, in half a minute
    python examples/text_classification.py --output_dir out --data glue/SST-2 --model folder --epsilon 3

--data has train.tsv and dev.tsv, --model has weights; by default both are made up. The same command again resumes.
"""

import csv
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.integrations.transformers import PrivacyArguments, PrivateTrainer

import transformers as hf  # isort: skip  (after groupwise, which repairs its import of torchvision)

MINI = Path(__file__).parents[1] / "pretrained" / "roberta_mini"
WORDS = (["dull", "clumsy", "boring", "cold"], ["lovely", "brilliant", "funny", "warm"])


@dataclass
class TextArguments:
    """What is read, and by what."""

    data: str | None = None
    model: str | None = None


def texts(folder: str | None, name: str, count: int) -> list[dict[str, str]]:
    """Rows with a sentence and a label, of a tsv file or made up."""
    if folder:
        lines = Path(folder, name).read_text(encoding="utf-8").split("\n")
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    labels = [random.randrange(2) for _ in range(count)]
    return [{"sentence": "a {} , {} film".format(*random.choices(WORDS[i], k=2)), "label": str(i)} for i in labels]


kinds: Any = (TextArguments, PrivacyArguments, hf.TrainingArguments)
parser = hf.HfArgumentParser(kinds)
parser.set_defaults(per_device_train_batch_size=150, gradient_accumulation_steps=4, learning_rate=0.02, epsilon=8.0)
which, privacy, args = parser.parse_args_into_dataclasses()
hf.set_seed(args.seed)
tokenizer = hf.AutoTokenizer.from_pretrained(which.model or MINI)
sizes: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32}
tiny = hf.AutoConfig.from_pretrained(MINI, initializer_range=0.1, **sizes)
auto = hf.AutoModelForSequenceClassification
model = auto.from_pretrained(which.model) if which.model else auto.from_config(tiny)
train, held_out = (
    [{**tokenizer(row["sentence"], truncation=True, max_length=128), "labels": int(row["label"])} for row in rows]
    for rows in (texts(which.data, "train.tsv", 6000), texts(which.data, "dev.tsv", 500))
)
given: dict[str, Any] = {"train_dataset": train, "eval_dataset": held_out, "processing_class": tokenizer}
given["compute_metrics"] = lambda found: {"accuracy": float((found[0].argmax(1) == found[1]).mean())}
trainer = PrivateTrainer(model, args, privacy=privacy, **given)
spent = trainer.train(any(Path(args.output_dir).glob("checkpoint-*/privacy.pt"))).metrics["epsilon"]
trainer.save_model()
print(f"epsilon {spent:.3f}, accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
