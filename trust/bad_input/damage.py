"""Damages a file: truncates it, flips bits, replaces it, or inserts unusual content in its own format."""

import gzip
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD = (
    "", " ", "\t", "\x00", "\ufeff", "\u2028", "\r", "🙂" * 50, "x" * 200_000, "a\u0300" * 500, "\x1b[31m", '"', '""',
    "'", ",", "\\", "<|endoftext|>", "<s></s><mask>", "<pad>" * 40, "NaN", "null", "-1", "\u202e", "\x85", "TL;DR",
    "|", "[", "a[b",
)  # fmt: skip
"""Texts that replace a cell or a word."""
VALUES: tuple[Any, ...] = (
    None, 0, -1, 1, 1.5, 10**12, 10**30, True, float("nan"), float("inf"), "", "x", "x" * 100_000, "\ud800", "\x00",
    "../x", "float16", [], {}, [[]], [None], [-1], [10**12, 10**12], ["a", "b"], {"a": {"b": []}}, {"text": 3},
)  # fmt: skip
"""Values that replace a JSON value."""
CODE: dict[str, Any] = {
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]},
    "tokenizer_class": "os.system",
    "chat_template": "{{ ''.__class__.__mro__ }}",
    "model_type": "../gpt2",
    "quantization_config": {"quant_method": "gptq"},
    "attn_implementation": "flash_attention_2",
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
}
"""Entries that request other code, or take long to process."""
JSONS = (
    "[" * 100_000, '{"a":' * 50_000, "[" * 900 + "]" * 900, "[1" + "0" * 5000 + "]", "NaN", "[NaN]", '["a"]', "[[]]",
    "[null]", "{}", "[{}]", "null", "1", '"text"', "[,]", "[{},]", '[{"id":1,"id":2}]', "// comment\n[]", "{'a': 1}",
    "[{}]\n[{}]", '{"id": "1"}\n{"id": "2"}', '["\\ud800"]', '{"a": 0}', '{"a": "x"}', '{"a": -1}', '{"a": 1e9}',
)  # fmt: skip
YAMLS = (
    "", "null", "[]", "x", "a: [", "seed: x", "clip: 3", "nothing: 1", "a: &a [*a]", "seed: ${seed}",
    "!!python/object/apply:os.system ['touch UNPICKLED']", "a: &a [x]\nb: &b [*a,*a]\nc: [*b,*b]",
    "seed: ${oc.env:PATH}", "seed: 1\nseed: 2", "\t", "{" * 5000, "\x00", "? [a]\n: b", "1: 2",
    "clip:\n  mapping:\n    1: 2", "../../../../etc/passwd", "http://localhost:1/a.parquet",
)  # fmt: skip


class TouchesAFile:
    """Unpickling it creates the file UNPICKLED in the current folder, which is a defect."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.open, ("UNPICKLED", os.O_CREAT | os.O_WRONLY)


MALICE = pickle.dumps({"x_train": TouchesAFile(), b"data": TouchesAFile()})
PAGE = b"<!DOCTYPE html><html><body>404 Not Found</body></html>"
OTHERS = (
    b"", b"\n", b"null", b"[]", b"{}", bytes(64), PAGE, b"version https://git-lfs.github.com/spec/v1\n", MALICE,
    b"\x89PNG\r\n\x1a\n", b"PK\x05\x06" + bytes(18), gzip.compress(PAGE, mtime=0), b"#!/bin/sh\n",
)  # fmt: skip
"""Contents of other file types."""


def damage(draw: random.Random, path: Path) -> None:
    """Damage a file in its format (if in `FORMATS`) or its bytes, or replace it by something else than a file."""
    chance, odd = draw.random(), FORMATS.get(path.suffix)
    if chance < 0.07:
        not_a_file(draw, path)
    elif chance < 0.5 and odd is not None:
        odd(draw, path)
    else:
        path.write_bytes(any_bytes(draw, path.read_bytes()))


def any_bytes(draw: random.Random, content: bytes) -> bytes:
    """The content truncated, doubled, with flipped bits, or with a part zeroed, removed or added; or other content."""
    at = draw.randrange(len(content) + 1)
    size = draw.choice((1, 7, 512, len(content) // 2))
    flipped = bytearray(content or b"\0")
    for _ in range(draw.choice((1, 1, 8, 200))):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    changed = (content[:at], bytes(flipped), content[:at] + bytes(size) + content[at + size :], draw.randbytes(size))
    more = (content[:at] + content[at + size :], content[:at] + draw.randbytes(size) + content[at:], content * 2)
    return draw.choice((*changed, content[:at], *more, draw.choice(OTHERS)))


def not_a_file(draw: random.Random, path: Path) -> None:
    """Replace the file by nothing, a folder, a link to itself, a device, a broken link, or a pipe."""
    path.unlink(missing_ok=True)
    what = draw.choice(("nothing", "folder", "pipe", path.name, "/dev/zero", "/nowhere/at/all"))
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what != "nothing":
        path.symlink_to(what)


# -- texts -------------------------------------------------------------------------------------------------------------

ENCODINGS: tuple[Callable[[str], bytes], ...] = (
    lambda text: text.encode("utf-16"),
    lambda text: text.encode("utf-8-sig"),
    lambda text: ("é" + text).encode("latin-1", errors="replace"),
    lambda text: text.replace("\n", "\r\n").encode(),
    lambda text: text.replace("\n", "\r").encode(),
    lambda text: text.replace("\n", "").encode(),
    lambda text: text.encode() + b"\xed\xa0\x80",
    lambda text: gzip.compress(text.encode()),
)


def text(draw: random.Random, path: Path) -> None:
    """Change, remove or add a cell, add an empty or repeated line, or use another encoding."""
    separator = {".tsv": "\t", ".csv": ","}.get(path.suffix, " ")
    lines = [line.split(separator) for line in path.read_text().split("\n")]
    for _ in range(draw.choice((0, 1, 1, 3))):
        line = draw.choice(lines)
        at, change = draw.randrange(len(line) + 1), draw.randrange(4)
        if change == 0:
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(([], [""], lines[0])))
        else:
            line[at : at + min(change, 2) - 1] = [] if change == 2 else [draw.choice(ODD)]
    content = "\n".join(separator.join(line) for line in lines)
    encoded = draw.choice(ENCODINGS) if draw.random() < 0.4 else None
    path.write_bytes(encoded(content) if encoded else content.encode(errors="surrogatepass"))


def json_text(draw: random.Random, path: Path) -> None:
    """Change, remove or rename a value, add an entry that asks for code, or write other JSON."""
    if draw.random() < 0.2:
        path.write_text(draw.choice(JSONS))
        return
    content = json.loads(path.read_text())
    for _ in range(draw.choice((1, 1, 3))):
        place: Any = content
        while isinstance(place, dict | list) and place:
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if draw.random() < 0.5 or not isinstance(place[key], dict | list) or not place[key]:
                break
            place = place[key]
        if isinstance(place, dict) and draw.random() < 0.2:
            place |= [draw.choice(list(CODE.items()))]
        elif place and draw.random() < 0.2:
            del place[key]
        elif place:
            place[key] = draw.choice(VALUES)
    path.write_text(json.dumps(content, ensure_ascii=draw.random() < 0.5), errors="surrogatepass")


def yaml_text(draw: random.Random, path: Path) -> None:
    """Replace the file by a text of `YAMLS`."""
    head = (
        "---\nconfigs:\n- config_name: sst2\n  data_files:\n  - split: train\n    path: "
        if path.suffix == ".md"
        else ""
    )
    path.write_text(head + draw.choice(YAMLS))


# -- weights -----------------------------------------------------------------------------------------------------------


def replace_member(path: Path, member: str, content: bytes) -> None:
    """Put another file into a zip, as a replacement or in addition."""
    with zipfile.ZipFile(path) as old:
        kept = {name: old.read(name) for name in old.namelist() if name != member}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for name, original in kept.items():
            new.writestr(name, original)
        new.writestr(member, content)


def tensors(draw: random.Random, path: Path) -> None:
    """Put another object, tensor or pickle into a file of `torch.save`."""
    import torch

    chance = draw.random()
    if chance < 0.2:
        replace_member(path, draw.choice((f"{path.stem}/data.pkl", "../../escape")), MALICE)
        return
    if chance < 0.4:
        other: tuple[Any, ...] = ([1, 2], {}, "text", {"model": TouchesAFile()}, {("a", 1): 2})
        torch.save(draw.choice(other), path)
        return
    state = torch.load(path, weights_only=True)
    key = draw.choice(list(state))
    odd: list[Any] = [*VALUES[:6], torch.zeros(0), torch.zeros(3, 3), torch.tensor(1)]
    if isinstance(old := state[key], torch.Tensor) and old.dim():
        odd += [old.mT if old.dim() > 1 else old[:1], old.double(), old.to(torch.int64), old.to_sparse(), old.half()]
        odd += [old.to(torch.complex64), old * torch.nan, old.new_zeros(()).expand(10**6, 10**5)]
    if chance < 0.5:
        del state[key]
    elif chance < 0.6:
        state[draw.choice(("other", "../x", 3, ""))] = old
    else:
        state[key] = draw.choice(odd)
    torch.save(state, path)


FORMATS: dict[str, Callable[[random.Random, Path], None]] = {
    **dict.fromkeys((".tsv", ".csv", ".txt", ".hash"), text),
    ".json": json_text,
    **dict.fromkeys((".yaml", ".md"), yaml_text),
    ".pt": tensors,
}
"""Suffix -> the function that damages files of that format; of other files only bytes are damaged."""
