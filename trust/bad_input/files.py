"""Files and folders that a command line reads: a valid set of each format, some files of which are then damaged."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trust.bad_input.attempt import Attempt, words
from trust.bad_input.damage import MALICE, damage
from trust.faults.process import complete

SMALL = words("scale=smoke train.steps=1 train.device=cpu eval.train_limit=2")
FLAT = (*SMALL, *words("privacy=noiseless clip=flat"))
TEXT = (*FLAT, *words("train.batch_size=2 data.train_limit=8"))
FILES = (*FLAT, *words("data.train_limit=8 train.batch_size=null train.sample_rate=0.5 data.name=files paths.data=."))
WRITES = words("eval.generate.limit=1 eval.generate.max_new_tokens=2 eval.generate.beams=1")
CIFAR = words("task=cifar data.name=cifar10 data.image_size=8")
IMAGE = words("scale=smoke privacy.epsilon=1 task=cifar clip=adaptive_layer data.train_limit=64 train.device=cpu")
STOPPED = (*IMAGE, "eval.train_limit=4", "train.checkpoint_every=0", "debug.noise_seed=1")
MODEL = (*TEXT, *WRITES, "task=e2e")
RECORD = ("config.yaml", "metrics.jsonl", "data.json", "git.json", "config.hash", "seeds.json", "privacy.json")
Sound = Callable[[Path], None]
"""Puts a valid set of files into a folder."""


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    Args:
        name: the row of the table.
        sound: creates the valid files.
        arguments: a command line that reads them.
        damaged: glob patterns; one or two of the matching files are damaged.
    """

    name: str
    sound: Sound
    arguments: tuple[str, ...]
    damaged: tuple[str, ...]


def file_attempts(seed: int, count: int, templates: Path) -> Iterator[Attempt]:
    """`count` attempts with damaged files, of all kinds in turn; `templates` is the folder of `make_templates`."""
    draw, several = random.Random(seed), kinds(templates)
    for number in range(count):
        kind = several[number % len(several)]
        prepare = partial(_prepare, kind, random.Random(draw.random()))
        yield Attempt(f"file: {kind.name}", kind.arguments, prepare, trains=True)


def _prepare(kind: Kind, draw: random.Random, folder: Path) -> None:
    kind.sound(folder)
    found = sorted(path for pattern in kind.damaged for path in folder.glob(pattern))
    for path in draw.sample(found, min(draw.choice((1, 1, 1, 2)), len(found))):
        damage(draw, path)


def texts(files: dict[str, str]) -> Sound:
    """A function that writes texts to files of these names."""

    def sound(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content.encode())

    return sound


def same(names: str, content: str) -> dict[str, str]:
    """The same text under each name."""
    return dict.fromkeys(names.split(), content)


def table(separator: str, rows: list[list[str]]) -> str:
    """Rows as lines of text."""
    return "".join(separator.join(row) + "\n" for row in rows)


def glue(task: str, home: str, names: list[str], row: Callable[[int], list[str]], valid: str = "dev.tsv") -> Kind:
    """The files of a GLUE task, 16 rows each."""
    content = table("\t", [names, *(row(i) for i in range(16))])
    files = same(" ".join(f"{home}/{name}" for name in ("train.tsv", *valid.split())), content)
    return Kind(f"{home} tsv", texts(files), (*FILES, f"task={task}"), (f"{home}/*.tsv",))


SAMSUM = [{"id": str(i), "summary": f"{i} meet.", "dialogue": f"A: hi {i}\r\nB: yes"} for i in range(12)]
DART = [{"tripleset": [["A", "IS", str(i)]], "annotations": [{"source": "x", "text": f"A is {i}."}]} for i in range(12)]
E2E = [["mr", "ref"], *([f'"name[The {i}], area[city centre]"', f'"The {i} is here."'] for i in range(12))]
README = """---
dataset_info:
- config_name: sst2
  features:
  - name: sentence
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': negative
          '1': positive
configs:
- config_name: sst2
  data_files:
  - split: train
    path: a.parquet
  - split: validation
    path: b.parquet
---
"""


def hub(folder: Path) -> None:
    """A data set in the layout of the Hugging Face hub."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "hub").mkdir()
    columns: dict[str, Any] = {"sentence": [f"a {i}" for i in range(16)], "label": [i % 2 for i in range(16)]}
    for name in "ab":
        pq.write_table(pa.table(columns), folder / "hub" / f"{name}.parquet")
    (folder / "hub" / "README.md").write_text(README)


def batches(folder: Path) -> None:
    """A CIFAR-10 folder with pickles other than the published ones, none of which may be unpickled."""
    home = folder / "cifar-10-batches-py"
    home.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
        (home / name).write_bytes(MALICE)


def mosaics(folder: Path) -> None:
    """CIFAR-10 as mosaic images."""
    from PIL import Image

    (folder / "cifar10").mkdir()
    first = folder / "cifar10" / "test.webp"
    Image.new("RGB", (3200, 3200), (1, 2, 3)).save(first, "WEBP", lossless=True)
    for shard in range(5):
        shutil.copy(first, first.with_name(f"train_shard{shard}.webp"))


def make_templates(folder: Path) -> None:
    """An exported model (`gpt2`), a run's weights, and a stopped run.

    Raises:
        RuntimeError: a run did not end as expected.
    """
    text = (*MODEL, "model.trains=all", f"export={folder / 'gpt2'}")
    for name, code, given in (("text", 0, text), ("image", 0, IMAGE), ("stopped", 9, STOPPED)):
        process = complete(folder / name, *given, before=_stop_at_the_third_step if code else None, small=())
        if process.code != code:
            raise RuntimeError(f"{' '.join(given)} ended with {process.code}:\n{process.errors}")
    (folder / "gpt2" / "evil.py").write_text("open('UNPICKLED', 'w')\n")  # the module that CODE names


def _stop_at_the_third_step() -> None:
    from groupwise.training.step import Trainer

    step = Trainer.step

    def stopping(trainer: Trainer, number: int) -> list[float]:
        if number == 2:
            os._exit(9)
        return step(trainer, number)

    Trainer.step = stopping  # type: ignore


def kinds(templates: Path) -> list[Kind]:
    """All kinds."""
    run = next((templates / "stopped" / "runs").iterdir(), templates)
    weights = next((templates / "image" / "runs").glob("*/model.pt"), templates)

    def copied(source: Path, to: str) -> Sound:
        copy = shutil.copytree if source.is_dir() else shutil.copy
        return lambda folder: copy(source, folder / to)  # type: ignore[operator, return-value]

    stopped = (f"results/runs/{run.name}/checkpoint*.pt", *(f"results/runs/{run.name}/{name}" for name in RECORD))
    images = (*FLAT, *CIFAR, "train.batch_size=4", "data.train_limit=16")
    dart = " ".join(f"dart/dart-v1.1.1-full-{part}.json" for part in ("train", "dev", "test"))
    found = [
        glue("sst2", "SST-2", ["sentence", "label"], lambda i: [f"a fine film {i}", str(i % 2)]),
        glue("mnli", "MNLI", ["index", "sentence1", "sentence2", "gold_label"],
             lambda i: [str(i), "a .", f"b {i} .", ("entailment", "neutral", "contradiction", "-")[i % 4]],
             "dev_matched.tsv dev_mismatched.tsv"),
        Kind("E2E csv", texts(same("e2e/trainset.csv e2e/devset.csv e2e/testset_w_refs.csv", table(",", E2E))),
             (*FILES, *WRITES, "task=e2e"), ("e2e/*",)),
        Kind("SAMSum json", texts(same("samsum/train.json samsum/val.json samsum/test.json", json.dumps(SAMSUM))),
             (*FILES, *WRITES, "task=samsum"), ("samsum/*",)),
        Kind("DART json", texts(same(dart, json.dumps(DART))), (*FILES, *WRITES, "task=dart"), ("dart/*",)),
        Kind("parquet", hub, (*FILES, "task=sst2", "data.hub=hub"), ("hub/a.parquet", "hub/README.md")),
        Kind("CIFAR batches", batches, (*images, "paths.data=."), ("cifar-10-batches-py/*",)),
        Kind("mosaics", mosaics, (*images, "paths.data=."), ("cifar10/*",)),
        *[Kind("model folder", copied(templates / "gpt2", "m"),
               (*TEXT, *WRITES, "task=samsum", "model=hub", "model.source=m", "model.trains=all"), (file,))
          for file in ("m/config.json", "m/generation_config.json", "m/model.safetensors")],
        Kind("tokeniser", copied(templates / "gpt2", "t"), (*MODEL, "model.tokenizer=t"), ("t/tokenizer*.json",)),
        *[Kind("weights", copied(weights, "model.pt"),
               (*IMAGE, "train.steps=1", "seed=1", "model.weights=model.pt"), ("model.pt",))] * 2,
        *[Kind("stopped run", copied(templates / "stopped", "results"), (*STOPPED, *resume), stopped)
          for resume in ((), (f"resume=results/runs/{run.name}",))],
    ]  # fmt: skip
    return found
