"""Models, tokenisers, weights and the folders of stopped runs, with something wrong in them."""

import io
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trust.bad_input.attempt import Attempt, live_in, words
from trust.bad_input.bytes import MALICE, TouchesAFile, any_bytes, not_a_file
from trust.bad_input.texts import JSON_TEXTS, JSON_VALUES

TEXT = words(
    "scale=smoke privacy=noiseless task=e2e clip=flat train.steps=1 train.batch_size=2 "
    "data.train_limit=8 eval.train_limit=2 "
    "eval.generate.limit=1 eval.generate.max_new_tokens=2 eval.generate.beams=1 train.device=cpu"
)
IMAGE = words(
    "scale=smoke privacy.epsilon=1 task=cifar "
    "clip=adaptive_layer data.train_limit=64 eval.train_limit=4 train.device=cpu"
)
STOPPED = (*IMAGE, "train.checkpoint_every=0", "debug.noise_seed=1")
SCRIPT = "open('UNPICKLED', 'w')\n"


def make_templates(folder: Path) -> None:
    """What is then altered: an exported model (`gpt2`), a finished run's weights, and the folder of a stopped run.

    Raises:
        RuntimeError: a run that must succeed did not.
    """
    live_in(folder / "text", (*TEXT, "model.trains=all", "export=gpt2"))
    live_in(folder / "image", IMAGE)
    live_in(folder / "stopped", STOPPED, before=_stop_at_the_third_step, code=9)
    vocabulary = json.loads((folder / "text" / "gpt2" / "tokenizer.json").read_text())["model"]
    original = folder / "bpe"
    original.mkdir()
    (original / "encoder.json").write_text(json.dumps(vocabulary["vocab"]))
    (original / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in vocabulary["merges"]))


def _stop_at_the_third_step() -> None:
    from groupwise.training.step import Trainer

    step = Trainer.step

    def stopping(trainer: Trainer, number: int) -> list[float]:
        if number == 2:
            os._exit(9)
        return step(trainer, number)

    Trainer.step = stopping  # type: ignore


def model_attempts(seed: int, count: int, templates: Path) -> Iterator[Attempt]:
    """`count` broken or unusual folders and weights, of each kind in turn."""
    draw = random.Random(seed)
    makers = (_model, _tokenizer, _weights, _stopped)
    for number in range(count):
        yield makers[number % len(makers)](random.Random(draw.random()), templates)


def _json_file(draw: random.Random, path: Path, odd: dict[str, tuple[Any, ...]]) -> None:
    """One entry of a JSON file replaced, lost or added, or the file broken."""
    way = draw.random()
    if way < 0.15:
        path.write_bytes(any_bytes(draw, path.read_bytes()))
    elif way < 0.25:
        path.write_text(draw.choice(JSON_TEXTS))
    else:
        content = json.loads(path.read_text())
        key = draw.choice([*odd, *odd, *content])
        content[key] = draw.choice(odd.get(key) or JSON_VALUES)
        if draw.random() < 0.1:
            del content[key]
        path.write_text(json.dumps(content))


CONFIG: dict[str, tuple[Any, ...]] = {
    "model_type": ("", "nothing", "bert", "t5", "roberta", None, 3, [], "../gpt2"),
    "vocab_size": (0, -1, 1, 100, 10**12, None, "x", 1.5),
    "n_embd": (0, -1, 1, 7, 10**9, "x", None),
    "n_layer": (0, -1, 1, 10**6, "x", None, 1.5),
    "n_head": (0, -1, 3, 10**6, "x", None),
    "n_positions": (0, 1, -1, 10**12, "x"),
    "auto_map": ({"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "x", [1]),
    "architectures": ([], ["Nothing"], "x", None),
    "torch_dtype": ("float16", "nothing", 3, "float64"),
    "dtype": ("float16", "nothing", 3, "bfloat16"),
    "activation_function": ("nothing", None, 3, "relu"),
    "layer_norm_epsilon": (0, -1, "x", float("nan")),
    "quantization_config": ({"quant_method": "gptq"}, {}, "x"),
    "attn_implementation": ("flash_attention_2", "x"),
    "tie_word_embeddings": (False, "x"),
    "eos_token_id": (0, -1, [1, 2], None, 10**9, "x"),
    "initializer_range": (-1, float("inf"), "x"),
    "resid_pdrop": (2, -1, "x"),
}
TOKENIZER: dict[str, tuple[Any, ...]] = {
    "tokenizer_class": ("", "Nothing", "LlamaTokenizer", "BertTokenizer", 3, None, "os.system"),
    "auto_map": ({"AutoTokenizer": ["evil.Tokenizer", None]}, "x"),
    "chat_template": ("{{ ''.__class__.__mro__ }}", "{% for", 3),
    "model_max_length": (0, -1, "x", 10**30),
    "eos_token": ("", None, "nothing", 3, {"content": "x"}),
    "bos_token": (None, "nothing", 3),
    "added_tokens_decoder": ({}, {"x": 1}, {"0": {"content": "x"}}, []),
}
FAST: dict[str, tuple[Any, ...]] = {
    "model": (
        {},
        None,
        {"type": "BPE", "vocab": {}, "merges": []},
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
        "x",
    ),
    "pre_tokenizer": (
        None,
        {"type": "Nothing"},
        {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    ),
    "normalizer": ({"type": "Nothing"}, {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
    "post_processor": (None, {"type": "Nothing"}),
    "decoder": (None, {"type": "Nothing"}),
    "added_tokens": ([], [{"id": 10**9, "content": "x"}], [{"id": -1}], "x", [1]),
    "version": ("9.9", None),
    "truncation": ({"max_length": 0, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}, 3),
}


def _copy(templates: Path, name: str, to: Path) -> None:
    shutil.copytree(templates / name, to)


def _model(draw: random.Random, templates: Path) -> Attempt:
    def prepare(folder: Path) -> None:
        _copy(templates, "text/gpt2", folder / "m")
        way = draw.random()
        weights = folder / "m" / "model.safetensors"
        if way < 0.45:
            _json_file(draw, folder / "m" / "config.json", CONFIG)
            (folder / "m" / "evil.py").write_text(SCRIPT)
        elif way < 0.55:
            _json_file(
                draw, folder / "m" / "generation_config.json", {"max_length": (-1, "x"), "eos_token_id": ("x", [], -5)}
            )
        elif way < 0.75:
            weights.write_bytes(any_bytes(draw, weights.read_bytes()))
        elif way < 0.9:
            weights.write_bytes(_header(draw, weights.read_bytes()))
        elif way < 0.95:
            weights.unlink()
            (folder / "m" / "pytorch_model.bin").write_bytes(MALICE)
        else:
            not_a_file(draw, folder / "m" / draw.choice(("config.json", "model.safetensors", "tokenizer.json")))

    return Attempt(
        "file: model folder", (*TEXT, "model=hub", "model.source=m", "model.trains=all"), prepare, trains=True
    )


def _header(draw: random.Random, content: bytes) -> bytes:
    """A safetensors file whose header lies."""
    size = struct.unpack("<Q", content[:8])[0]
    described = json.loads(content[8 : 8 + size])
    way = draw.randrange(4)
    if way == 0:
        return struct.pack("<Q", draw.choice((0, 1, size - 1, size + 1, 2**40, 2**64 - 1))) + content[8:]
    name = draw.choice([key for key in described if key != "__metadata__"])
    if way == 1:
        del described[name]
    elif way == 2:
        described[name][draw.choice(("dtype", "shape", "data_offsets"))] = draw.choice(
            ("F16", "I64", "X", [], [0], [1, 2], [-1, 4], [10**12, 10**12], [0, 10**15], None)
        )
    else:
        described[draw.choice(("../escape", "x" * 10_000, "\ud800"[:0] + "other"))] = described.pop(name)
    text = json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def _tokenizer(draw: random.Random, templates: Path) -> Attempt:
    original = draw.random() < 0.35

    def prepare(folder: Path) -> None:
        _copy(templates, "bpe" if original else "text/gpt2", folder / "t")
        way = draw.random()
        if original:
            path = folder / "t" / draw.choice(("encoder.json", "vocab.bpe"))
            if way < 0.6 or path.suffix == ".bpe":
                path.write_bytes(any_bytes(draw, path.read_bytes()))
            else:
                path.write_text(
                    draw.choice(
                        (*JSON_TEXTS, '{"a": 0}', '{"a": "x"}', '{"a": -1}', '{"a": 1e9}', '{"<|endoftext|>": 0}')
                    )
                )
        elif way < 0.5:
            _json_file(draw, folder / "t" / "tokenizer_config.json", TOKENIZER)
            (folder / "t" / "evil.py").write_text(SCRIPT)
        else:
            _json_file(draw, folder / "t" / "tokenizer.json", FAST)

    return Attempt("file: tokeniser", (*TEXT, "model.tokenizer=t"), prepare, trains=True)


def _saved(value: Any) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _altered_state(draw: random.Random, content: bytes) -> bytes:
    """A sound file of torch whose content is another."""
    import torch

    state = torch.load(io.BytesIO(content), weights_only=True)
    key = draw.choice(list(state))
    old = state[key]
    values: list[Any] = [
        None,
        0,
        "x",
        b"x",
        [],
        {},
        -1,
        10**30,
        float("nan"),
        torch.zeros(0),
        torch.zeros(3, 3),
        torch.tensor(1),
    ]
    if isinstance(old, torch.Tensor) and old.dim():
        values += [
            old.mT if old.dim() > 1 else old,
            old[:1],
            old.double(),
            old.to(torch.int64),
            old.to_sparse(),
            old.half(),
        ]
        values += [old.to(torch.complex64), old * torch.nan, old.new_zeros(()).expand(10**6, 10**5)]
    way = draw.randrange(6)
    if way == 0:
        del state[key]
    elif way == 1:
        state[draw.choice(("other", "../x", 3, ""))] = old
    else:
        state[key] = draw.choice(values)
    return _saved(state)


def _weights(draw: random.Random, templates: Path) -> Attempt:
    def prepare(folder: Path) -> None:
        sound = next((templates / "image" / "results" / "runs").glob("*/model.pt")).read_bytes()
        path = folder / "model.pt"
        way = draw.random()
        if way < 0.4:
            path.write_bytes(any_bytes(draw, sound))
        elif way < 0.75:
            path.write_bytes(_altered_state(draw, sound))
        elif way < 0.95:
            path.write_bytes(draw.choice(PICKLES)(sound))
        else:
            not_a_file(draw, path)

    return Attempt("file: weights", (*IMAGE, "train.steps=1", "seed=1", "model.weights=model.pt"), prepare, trains=True)


def _pickled(sound: bytes) -> bytes:
    """torch's archive with another pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(sound)) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.namelist():
            new.writestr(item, MALICE if item.endswith("data.pkl") else old.read(item))
        new.writestr("../../escape", "x")
    return out.getvalue()


PICKLES: tuple[Callable[[bytes], bytes], ...] = (
    _pickled,
    lambda sound: MALICE,
    lambda sound: _saved([1, 2]),
    lambda sound: _saved({}),
    lambda sound: _saved("text"),
    lambda sound: _saved({"model": TouchesAFile()}),
    lambda sound: _saved({("a", 1): 2}),
)

RECORD = (
    "config.yaml",
    "metrics.jsonl",
    "data.json",
    "git.json",
    "config.hash",
    "seeds.json",
    "privacy.json",
    "environment.json",
)
YAML = (
    "", "null", "[]", "x", "a: [", "seed: x", "clip: 3", "nothing: 1",
    "!!python/object/apply:os.system ['touch UNPICKLED']", "a: &a [*a]", "a: &a [x]\nb: &b [*a,*a]\nc: [*b,*b]",
    "seed: ${seed}", "seed: ${oc.env:PATH}", "seed: 1\nseed: 2", "\t", "{" * 5000, "\x00", "? [a]\n: b", "1: 2",
    "clip:\n  mapping:\n    1: 2",
)  # fmt: skip


def _stopped(draw: random.Random, templates: Path) -> Attempt:
    """A run that was stopped, whose checkpoint or record is broken: it is refused, begun afresh or gone on with."""
    run = next((templates / "stopped" / "results" / "runs").iterdir())
    named = draw.random() < 0.4

    def prepare(folder: Path) -> None:
        _copy(templates, "stopped/results", folder / "results")
        here = folder / "results" / "runs" / run.name
        way = draw.random()
        for path in sorted(here.glob("checkpoint*.pt"))[: draw.choice((1, 2))] if way < 0.6 else ():
            other = next((templates / "image" / "results" / "runs").glob("*/model.pt"))
            path.write_bytes(any_bytes(draw, path.read_bytes()) if way < 0.5 else other.read_bytes())
        if 0.6 <= way < 0.75:
            (here / "config.yaml").write_text(draw.choice(YAML))
        elif 0.75 <= way < 0.95:
            path = here / draw.choice(RECORD)
            path.write_bytes(any_bytes(draw, path.read_bytes()))
        elif way >= 0.95:
            not_a_file(draw, here / draw.choice(("checkpoint.pt", *RECORD)))

    given = (*STOPPED, f"resume=results/runs/{run.name}") if named else STOPPED
    return Attempt("file: stopped run", given, prepare, trains=True)
