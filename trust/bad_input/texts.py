"""Text files with something wrong in them: GLUE's tsv and parquet, E2E's csv, SAMSum's and DART's json, corpora."""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trust.bad_input.attempt import Attempt, words
from trust.bad_input.bytes import any_bytes, not_a_file

SMALL = words(
    "scale=smoke privacy=noiseless data.name=files paths.data=. train.steps=1 "
    "train.sample_rate=0.5 train.batch_size=null data.train_limit=8 eval.train_limit=2 train.device=cpu"
)
WRITES = words("eval.generate.limit=1 eval.generate.max_new_tokens=2 eval.generate.beams=1")
ODD = (
    "", " ", "\t", "\x00", "\ufeff", "\u2028", "\r", "🙂" * 50, "x" * 200_000, "a\u0300" * 500, "\x1b[31m", '"', '""',
    "'", ",", "\\", "<|endoftext|>", "<s></s><mask>", "<pad>" * 40, "NaN", "null", "-1", "\u202e", "\x85", "TL;DR",
    "|", "[", "a[b",
)  # fmt: skip
Encoder = Callable[[str], bytes]
ENCODINGS: tuple[Encoder, ...] = (
    lambda text: text.encode("utf-16"),
    lambda text: text.encode("utf-8-sig"),
    lambda text: ("é" + text).encode("latin-1", errors="replace"),
    lambda text: text.replace("\n", "\r\n").encode(),
    lambda text: text.replace("\n", "\r").encode(),
    lambda text: text.replace("\n", "").encode(),
    lambda text: text.encode() + b"\xed\xa0\x80",
    lambda text: gzip.compress(text.encode()),
)


def text_attempts(seed: int, count: int) -> Iterator[Attempt]:
    """`count` broken or unusual text files, of all formats in turn."""
    draw = random.Random(seed)
    makers = (_glue, _e2e, _samsum, _dart, _glue, _e2e, _samsum, _hub)
    for number in range(count):
        yield makers[number % len(makers)](random.Random(draw.random()))


def _write(draw: random.Random, path: Path, text: str) -> None:
    """The text as a file: sound, in another encoding, with broken bytes, or no file at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    way = draw.random()
    content = text.encode(errors="surrogatepass")
    if 0.3 <= way < 0.5:
        content = draw.choice(ENCODINGS)(text)
    elif 0.5 <= way < 0.93:
        content = any_bytes(draw, content)
    path.write_bytes(content)
    if way >= 0.93:
        not_a_file(draw, path)


def _cells(draw: random.Random, rows: list[list[str]]) -> list[list[str]]:
    """Rows with an odd cell, a column lost or added, a row empty or twice."""
    rows = [list(row) for row in rows]
    for _ in range(draw.choice((0, 1, 1, 3))):
        row = draw.choice(rows)
        at = draw.randrange(len(row)) if row else 0
        change = draw.randrange(5)
        if change <= 1 and row:
            row[at] = draw.choice(ODD)
        elif change == 2 and row:
            del row[at]
        elif change == 3:
            row.insert(at, draw.choice(ODD))
        else:
            rows.insert(draw.randrange(len(rows) + 1), draw.choice(([], [""], rows[0])))
    return rows


GLUE = {
    "sst2": ("SST-2", ["sentence", "label"], lambda i: [f"a fine film {i}", str(i % 2)], ("dev.tsv",)),
    "qnli": ("QNLI", ["index", "question", "sentence", "label"],
             lambda i: [str(i), f"who is {i} ?", "it is .", ("entailment", "not_entailment")[i % 2]], ("dev.tsv",)),
    "qqp": ("QQP", ["id", "question1", "question2", "is_duplicate"],
            lambda i: [str(i), "a ?", f"b {i} ?", str(i % 2)], ("dev.tsv",)),
    "mnli": ("MNLI", ["index", "sentence1", "sentence2", "gold_label"],
             lambda i: [str(i), "a .", f"b {i} .", ("entailment", "neutral", "contradiction", "-")[i % 4]],
             ("dev_matched.tsv", "dev_mismatched.tsv")),
}  # fmt: skip


def _glue(draw: random.Random) -> Attempt:
    task = draw.choice(list(GLUE))
    home, names, row, valid = GLUE[task]

    def prepare(folder: Path) -> None:
        rows = [names, *(row(i) for i in range(16))]
        sound = "\n".join("\t".join(cells) for cells in rows) + "\n"
        files = [folder / home / name for name in ("train.tsv", *valid)]
        files[0].parent.mkdir()
        for file in files:
            file.write_text(sound)
        _write(draw, draw.choice(files), "\n".join("\t".join(cells) for cells in _cells(draw, rows)) + "\n")

    return Attempt(f"file: {home} tsv", (*SMALL, f"task={task}", "clip=flat"), prepare, trains=True)


def _e2e(draw: random.Random) -> Attempt:
    def prepare(folder: Path) -> None:
        rows = [["mr", "ref"], *([f"name[The {i}], area[city centre]", f"The {i} is here."] for i in range(12))]

        def text(rows: list[list[str]], quote: bool = True) -> str:
            return "".join(",".join(f'"{cell}"' if quote else cell for cell in row) + "\n" for row in rows)

        names = ("trainset.csv", "devset.csv", "testset_w_refs.csv")
        (folder / "e2e").mkdir()
        for name in names:
            (folder / "e2e" / name).write_text(text(rows))
        _write(draw, folder / "e2e" / draw.choice(names), text(_cells(draw, rows), draw.random() < 0.7))

    return Attempt("file: E2E csv", (*SMALL, *WRITES, "task=e2e", "clip=flat"), prepare, trains=True)


JSON_VALUES: tuple[Any, ...] = (
    None, 0, -1, 1.5, True, "", " ", [], {}, [[]], "x" * 100_000, "\ud800", "🙂", float("nan"), [None],
    {"a": {"b": []}}, "\x00", 10**30, "\r\n", ["a", "b"], [["a", "b", "c"]], {"text": 3},
)  # fmt: skip
JSON_TEXTS = (
    "[" * 100_000, '{"a":' * 50_000, "[" * 900 + "]" * 900, "[1" + "0" * 5000 + "]", "NaN", "[NaN]", '["a"]', "[[]]",
    "[null]", "{}", "[{}]", "null", "1", '"text"', "[,]", "[{},]", '[{"id":1,"id":2}]', "// comment\n[]", "{'a': 1}",
    "[{}]\n[{}]", '{"id": "1"}\n{"id": "2"}', '["\\ud800"]',
    '[{"id": "\\ud800", "dialogue": "\\udfff", "summary": "x"}]',
)  # fmt: skip


def _json(draw: random.Random, entries: list[dict[str, Any]]) -> str:
    """The entries with an odd value, a field lost or added, or other JSON altogether."""
    if draw.random() < 0.2:
        return draw.choice(JSON_TEXTS)
    entries = json.loads(json.dumps(entries))
    for _ in range(draw.choice((0, 1, 1, 3))):
        entry = draw.choice(entries)
        key = draw.choice(list(entry) or ["x"])
        change = draw.randrange(4)
        if change <= 1:
            entry[key] = draw.choice(JSON_VALUES)
        elif change == 2:
            entry.pop(key, None)
        else:
            entry[draw.choice(("extra", "", "id"))] = draw.choice(JSON_VALUES)
    return json.dumps(entries, ensure_ascii=draw.random() < 0.5)


def _paired(
    draw: random.Random, task: str, home: str, names: tuple[str, ...], entries: list[dict[str, Any]]
) -> Attempt:
    def prepare(folder: Path) -> None:
        (folder / home).mkdir()
        for name in names:
            (folder / home / name).write_text(json.dumps(entries))
        _write(draw, folder / home / draw.choice(names), _json(draw, entries))

    return Attempt(f"file: {task} json", (*SMALL, *WRITES, f"task={home}", "clip=flat"), prepare, trains=True)


def _samsum(draw: random.Random) -> Attempt:
    entries = [{"id": str(i), "summary": f"{i} meet.", "dialogue": f"A: hi {i}\r\nB: yes"} for i in range(12)]
    return _paired(draw, "SAMSum", "samsum", ("train.json", "val.json", "test.json"), entries)


def _dart(draw: random.Random) -> Attempt:
    entries = [
        {"tripleset": [["A", "IS", str(i)]], "annotations": [{"source": "x", "text": f"A is {i}."}]} for i in range(12)
    ]
    names = tuple(f"dart-v1.1.1-full-{part}.json" for part in ("train", "dev", "test"))
    return _paired(draw, "DART", "dart", names, entries)


README = """---
configs:
- config_name: sst2
  data_files:
  - split: train
    path: {}
  - split: validation
    path: b.parquet
---
"""


def _hub(draw: random.Random) -> Attempt:
    def prepare(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        (folder / "hub").mkdir()
        columns: dict[str, Any] = {"sentence": [f"a {i}" for i in range(16)], "label": [i % 2 for i in range(16)]}
        for name in "ab":
            pq.write_table(pa.table(columns), folder / "hub" / f"{name}.parquet")
        readme, path = folder / "hub" / "README.md", folder / "hub" / "a.parquet"
        readme.write_text(README.format("a.parquet"))
        way = draw.random()
        if way < 0.4:
            path.write_bytes(any_bytes(draw, path.read_bytes()))
        elif way < 0.6:
            readme.write_bytes(any_bytes(draw, readme.read_bytes()))
        elif way < 0.75:
            readme.write_text(README.format(draw.choice(HUB_PATHS)))
        elif way < 0.8:
            (folder / "hub" / "hub.py").write_text("open('UNPICKLED', 'w')")
        else:
            columns[draw.choice(("sentence", "label", "other"))] = draw.choice(COLUMNS)
            pq.write_table(pa.table(columns), path)

    given = (*SMALL, "task=sst2", "clip=flat", "data.hub=hub")
    return Attempt("file: parquet", given, prepare, trains=True)


HUB_PATHS = (
    "../../../../etc/passwd", "/etc/passwd", "nothing.parquet", "*.parquet", "'[a'", "http://localhost:1/a.parquet",
    "~", "null", "[]", "{a: b}", "!!python/object/apply:os.system ['touch UNPICKLED']", "zip://x::a.zip",
    "hf://datasets/a/b", "''",
)  # fmt: skip
COLUMNS: tuple[Any, ...] = (
    [None] * 16, ["x"] * 16, [2] * 16, [-1] * 16, [0.5] * 16, [[1]] * 16, [b"\xff"] * 16, [True] * 16, [""] * 16,
    [2**40] * 16, [{"a": 1}] * 16,
)  # fmt: skip
