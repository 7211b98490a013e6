"""Reads SAMSum: dialogues and their summaries, in the paper's instruction format (appendix C)."""

from pathlib import Path

from groupwise.data.text_examples import PairedText, Request, read_json_list, sha256_of_files
from groupwise.errors import UserError

FILES = "put SAMSum's train.json, val.json and test.json there, or give paths.data=FOLDER"


def load_samsum(root: Path, train_file: str | None = None) -> PairedText:
    """Load SAMSum from `root`/samsum: train.json, val.json, test.json, lists of {"id", "summary", "dialogue"}.

    A row without a dialogue, of which the published training file has one, is dropped and counted in `source`.

    Raises:
        UserError: a missing file, no JSON, a row without one of the three fields, or an empty summary.
    """
    folder = root / "samsum"
    files = [folder / (train_file or "train.json"), folder / "val.json", folder / "test.json"]
    pairs, notes = [], ""
    for path in files:
        rows, dropped = read_samsum_json(path)
        pairs.append(rows)
        notes += f"; {dropped:,} rows of {path.name} without a dialogue dropped" if dropped else ""
    return PairedText(
        train=pairs[0],
        valid=[Request(source, (target,)) for source, target in pairs[1]],
        test=[Request(source, (target,)) for source, target in pairs[2]],
        source=f"SAMSum, json files (training: {files[0].name}){notes}",
        sha256=sha256_of_files(files, root),
    )


def instruct(dialogue: str) -> str:
    """The source of a dialogue: an instruction before it and the delimiter of the summary after it.

    The paper prepends "Summarize the following dialogue" to inputs and "TL;DR" to outputs. The delimiter stands at the
    end of our source, so that the loss and the generated text are of the summary alone.
    """
    return f"Summarize the following dialogue\n{dialogue}\nTL;DR"


def read_samsum_json(path: Path) -> tuple[list[tuple[str, str]], int]:
    """Read one file as (instructed dialogue, summary), and how many rows without a dialogue were dropped.

    Raises:
        UserError: the file is missing or no JSON, a row lacks a field, or a summary is empty.
    """
    pairs, dropped = [], 0
    for number, row in enumerate(read_json_list(path, FILES)):
        name = row.get("id", f"number {number}")
        for field in ("dialogue", "summary"):
            if not isinstance(row.get(field), str):
                raise UserError(f"{path}: row {name} has no {field}; every row has id, dialogue, summary, so mend it.")
        dialogue, summary = (row[field].replace("\r\n", "\n").strip() for field in ("dialogue", "summary"))
        if not summary:
            raise UserError(f"{path}: row {name} has an empty summary; write one, or remove the row.")
        if dialogue:
            pairs.append((instruct(dialogue), summary))
        else:
            dropped += 1
    if not pairs:
        raise UserError(f"{path} holds no row with a dialogue; at least one is needed, so replace the file.")
    return pairs, dropped
