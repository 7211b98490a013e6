"""Reads pairs of texts from files: tables with descriptions (E2E, DART) and dialogues with summaries (SAMSum).

The tables are linearised as in Li & Liang (2021). The dialogues are in the paper's instruction format (appendix C).
"""

import io
import re
from pathlib import Path
from typing import Any

from groupwise.data.text_examples import PairedText, Request, by_source, read_json_list, read_text, sha256_of_files
from groupwise.errors import UserError, reason

E2E_TRAIN = ("trainset.csv", "trainset.reconstructed.csv")
E2E_FILES = f"put the E2E data set's {E2E_TRAIN[0]}, devset.csv and testset_w_refs.csv there, or give paths.data=FOLDER"
DART_TEST = ("dart-v1.1.1-full-test.json", "dart-v1.1.1-full-test.from_xml.json")
DART_FILES = (
    f"put DART's dart-v1.1.1-full-train.json, dart-v1.1.1-full-dev.json and {DART_TEST[0]} there, or give "
    "paths.data=FOLDER; data.train_file names another training file of that folder"
)

_SLOT = re.compile(r"\s*([^\[\],]+)\[([^\]]*)\]\s*(?:,|$)")
_SLOTS = re.compile(rf"(?:{_SLOT.pattern})+")
_SLOT_NAMES = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}


def load_e2e(root: Path, train_file: str | None = None) -> PairedText:
    """Load E2E from `root`/e2e: trainset.csv (or trainset.reconstructed.csv), devset.csv, testset_w_refs.csv.

    Each row of the training file is an example. In the validation and test sets the rows of one meaning representation
    (MR) are one request with several references, in the order in which the MRs first occur.

    Raises:
        UserError: a missing file or column, an empty cell, or an MR that cannot be parsed.
    """
    folder = root / "e2e"
    train = folder / (train_file or _first_there(folder, E2E_TRAIN))
    files = [train, folder / "devset.csv", folder / "testset_w_refs.csv"]
    rows = [read_e2e_csv(path) for path in files]
    return PairedText(
        train=rows[0],
        valid=by_source(rows[1]),
        test=by_source(rows[2]),
        source=f"E2E, csv files (training: {train.name})",
        sha256=sha256_of_files(files, root),
    )


def load_dart(root: Path, train_file: str | None = None) -> PairedText:
    """Load DART v1.1.1 from `root`/dart: dart-v1.1.1-full-train.json, -dev.json, -test.json (or -test.from_xml.json).

    A set of triples and one of its texts are a training example. An entry of the file, with all its texts, is a
    request. Texts are not changed; one of the test set's references is empty.

    Raises:
        UserError: a missing file, a file that is not JSON, or an entry of another form.
    """
    folder = root / "dart"
    train = folder / (train_file or "dart-v1.1.1-full-train.json")
    files = [train, folder / "dart-v1.1.1-full-dev.json", folder / _first_there(folder, DART_TEST)]
    entries = [read_dart_json(path) for path in files]
    return PairedText(
        train=[(entry.source, text) for entry in entries[0] for text in entry.references],
        valid=entries[1],
        test=entries[2],
        source=f"DART v1.1.1, json files (training: {train.name})",
        sha256=sha256_of_files(files, root),
    )


def linearise_mr(mr: str) -> str:
    """Write an MR as text.

    "name[Alimentum], area[city centre], familyFriendly[no]" becomes
    "name : Alimentum | area : city centre | family friendly : no". As in Li & Liang
    (2021) and Li et al. (2022), eatType becomes Type, priceRange price, and familyFriendly family friendly. Slots keep
    the MR's order. Values are unchanged. (In those authors' copy of the data they are tokenised: £ 30.)

    Raises:
        ValueError: the MR is not a list of slot[value].
    """
    if not _SLOTS.fullmatch(mr):
        raise ValueError(mr)
    slots = [(name.strip(), value.strip()) for name, value in _SLOT.findall(mr)]
    return " | ".join(f"{_SLOT_NAMES.get(name, name)} : {value}" for name, value in slots)


def linearise_triples(triples: list[Any]) -> str:
    """Write triples as text: "subject : predicate : object | ...", predicates in lower case (Li & Liang, 2021).

    Raises:
        ValueError: there is no triple, or one is not three strings.
    """
    whole = [triple for triple in triples if isinstance(triple, list | tuple) and list(map(type, triple)) == [str] * 3]
    if not triples or len(whole) < len(triples):
        raise ValueError(triples)
    return " | ".join(f"{subject} : {predicate.lower()} : {object_}" for subject, predicate, object_ in triples)


def read_e2e_csv(path: Path) -> list[tuple[str, str]]:
    """Read the columns mr and ref of one file as pairs (linearised MR, reference), one per row; see `load_e2e`."""
    import pandas as pd

    text = read_text(path, E2E_FILES)
    try:
        table = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
    except ValueError as error:
        raise UserError(f"{path} is not CSV ({reason(error)}); replace the file.") from error
    table.columns = table.columns.str.strip().str.lower()
    missing = [name for name in ("mr", "ref") if name not in table]
    if missing or table.empty:
        what = f"no column {missing[0]}" if missing else "no row"
        raise UserError(f"{path} has {what}; the header mr,ref and at least one row are needed, so replace the file.")
    pairs = []
    for number, (mr, reference) in enumerate(zip(table["mr"], table["ref"].str.strip(), strict=True), start=1):
        try:
            pairs.append((linearise_mr(mr if reference else ""), reference))
        except ValueError as error:
            raise UserError(
                f"{path}: row {number} has no ref, or no mr of slots such as area[city centre]; fix or remove it."
            ) from error
    return pairs


def read_dart_json(path: Path) -> list[Request]:
    """Read one file: a list of {"tripleset": [[subject, predicate, object], ...], "annotations": [{"text"}, ...]}.

    A message about an entry gives its number, from 0; see `load_dart`.
    """
    requests = []
    for number, entry in enumerate(read_json_list(path, DART_FILES)):
        try:
            source = linearise_triples(entry["tripleset"])
            texts = tuple(annotation["text"].strip() for annotation in entry["annotations"])
            if not texts:
                raise ValueError(entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path}: entry {number} is not of the form tripleset (triples), annotations (texts); fix or remove it."
            ) from error
        requests.append(Request(source, texts))
    return requests


def _first_there(folder: Path, names: tuple[str, ...]) -> str:
    """The first of the names that is a file in the folder; if none is, the first name."""
    return next((name for name in names if (folder / name).is_file()), names[0])


SAMSUM_FILES = "put SAMSum's train.json, val.json and test.json there, or give paths.data=FOLDER"


def load_samsum(root: Path, train_file: str | None = None) -> PairedText:
    """Load SAMSum from `root`/samsum: train.json, val.json, test.json, lists of {"id", "summary", "dialogue"}.

    A row without a dialogue, of which the published training file has one, is dropped and counted in `source`.

    Raises:
        UserError: a missing file, a file that is not JSON, a row without one of the fields, or an empty summary.
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
    """The source of a dialogue: an instruction before it, and the delimiter of the summary after it.

    The paper prepends "Summarize the following dialogue" to inputs and "TL;DR" to outputs. Here the delimiter is at
    the end of the source, so that loss and generated text cover the summary alone.
    """
    return f"Summarize the following dialogue\n{dialogue}\nTL;DR"


def read_samsum_json(path: Path) -> tuple[list[tuple[str, str]], int]:
    """Read one file as (instructed dialogue, summary), and how many rows were dropped; see `load_samsum`."""
    pairs, dropped = [], 0
    for number, row in enumerate(read_json_list(path, SAMSUM_FILES)):
        name = row.get("id", f"number {number}")
        dialogue, summary = row.get("dialogue"), row.get("summary")
        if not isinstance(dialogue, str) or not isinstance(summary, str) or not summary.strip():
            raise UserError(f"{path}: row {name} lacks a dialogue, or a summary that is not empty; fix or remove it.")
        dialogue, summary = (text.replace("\r\n", "\n").strip() for text in (dialogue, summary))
        if dialogue:
            pairs.append((instruct(dialogue), summary))
        else:
            dropped += 1
    if not pairs:
        raise UserError(f"{path} has no row with a dialogue; replace the file.")
    return pairs, dropped


PAIRED = {"e2e": load_e2e, "dart": load_dart, "samsum": load_samsum}
"""The function that reads a task's files below a folder, with another training file if one is named."""
