"""Measures the constant-prediction baseline of each task, which a run must beat to be informative.

    python scripts/constant_answers.py DATA [--out results/measured/constant_answers.csv]

Classification: the larger class of the evaluated split. Generation: the best score of `TRIES` training targets on
the test split itself, which favours the baseline.
"""

import argparse
from collections import Counter
from pathlib import Path
from random import Random

from groupwise.atomic import write_text
from groupwise.data.cifar10 import load_cifar10
from groupwise.data.glue import load_glue
from groupwise.data.text import load_dart, load_e2e, load_samsum
from groupwise.metrics import corpus_bleu, e2e_rouge_l, rouge
from groupwise.rows import csv_text

TRIES = 30
GLUE = ("sst2", "qnli")


def majority(labels: list[int]) -> float:
    """The share of the largest class, in percent."""
    return 100 * max(Counter(labels).values()) / len(labels)


def best_constant(task: str, root: Path) -> dict[str, float]:
    """The best score, by metric, of one text for all test inputs."""
    data = {"e2e": load_e2e, "dart": load_dart, "samsum": load_samsum}[task](
        root, "webnlg2017-train.json" if task == "dart" else None
    )
    references = [request.references for request in data.test]
    found: dict[str, float] = {}
    for _, answer in Random(0).sample(data.train, TRIES):
        texts = [answer] * len(references)
        scores = rouge(texts, references) if task == "samsum" else {"rougeL": e2e_rouge_l(texts, references)}
        if task != "samsum":
            scores["bleu"] = corpus_bleu(texts, references)
        for name, value in scores.items():
            found[f"test/{name}"] = max(found.get(f"test/{name}", 0.0), value)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/measured/constant_answers.csv"))
    given = parser.parse_args()
    rows = [("cifar", "valid/accuracy", majority(load_cifar10(given.data).y_test.tolist()))]
    for task in GLUE:
        data = load_glue(task, given.data, hub="nyu-mll/glue", train_file="dev.tsv")  # only the evaluated split is used
        rows.append((task, "valid/accuracy", majority(list(next(iter(data.valid.values())).labels))))
    for task in ("e2e", "dart", "samsum"):
        rows += [(task, metric, value) for metric, value in sorted(best_constant(task, given.data).items())]
    text = csv_text(("task", "metric", "value"), ((task, metric, f"{value:.2f}") for task, metric, value in rows))
    write_text(given.out, text)
    print(text, end="")


if __name__ == "__main__":
    main()
