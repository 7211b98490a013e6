"""Loading a file runs no code, names in files stay inside their folder, and only checkpoints hold the noise key."""

import ast
import base64
import hashlib
import io
import json
import pickle
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.compose import compose_run
from groupwise.config.schema import ModelConfig
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from groupwise.run import run
from groupwise.training.step import Trainer
from tests.checked import verify_once
from tests.rdp_alone import rdp_alone

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    ROOT / "run.py",
    *(file for room in ("src", "benchmarks", "analysis") for file in (ROOT / room).rglob("*.py")),
]

# -- no pickle from a file that somebody else may have written --------------------------------------------------------

OWN_PIPES = {"src/groupwise/processes/start.py", "src/groupwise/sweeps/slurm.py"}
"""Their pickles come from this user's own processes, in a folder of their own."""
RUNS_CODE = {
    "pickle.load", "pickle.loads", "cPickle.load", "dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads",
    "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "pd.read_pickle", "pandas.read_pickle", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "eval", "exec", "shutil.unpack_archive",
}  # fmt: skip
REQUIRED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
METHODS = {"extractall"}
"""Methods of archives, in which a name may point outside of the folder."""


def unsafe_calls(source: str) -> Iterator[str]:
    """The calls in a Python file that may run what they read, or let it choose a path."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {item.arg: item.value for item in node.keywords if item.arg}
        constants = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
        if name in RUNS_CODE or (isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
            yield name
        if name in REQUIRED and constants.get(REQUIRED[name][0]) is not REQUIRED[name][1]:
            yield f"{name} without {REQUIRED[name][0]}={REQUIRED[name][1]}"
        for key, safe in (("trust_remote_code", False), ("shell", False), ("use_safetensors", True)):
            if key in given and constants.get(key) is not safe:
                yield f"{name} with {key}"


@pytest.mark.parametrize(
    "planted",
    [
        "pickle.load(file)", "torch.load(path)", "torch.load(path, weights_only=False)", "np.load(path)", "eval(text)",
        "np.load(path, allow_pickle=True)", "f(x, trust_remote_code=True)", "subprocess.run(c, shell=True)",
        "archive.extractall(folder)", "yaml.load(text)", "f(place, use_safetensors=wanted)",
    ],
)  # fmt: skip
def test_unsafe_calls_are_found(planted):
    assert len(list(unsafe_calls(planted))) == 1


def test_no_source_file_makes_an_unsafe_call():
    found = {}
    for file in SOURCES:
        name = file.relative_to(ROOT).as_posix()
        calls = set(unsafe_calls(file.read_text(encoding="utf-8")))
        if name in OWN_PIPES:
            calls -= {"pickle.load", "pickle.loads"}
        if calls:
            found[name] = calls
    assert not found


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def bomb(tmp_path) -> Iterator[Bomb]:
    """A bomb: the fixture shows that it works, and asserts that the test has not unpickled it."""
    mark = tmp_path / "went-off"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()
    mark.unlink()
    yield Bomb(mark)
    assert not mark.exists(), "code from a file was run"


def torch_file(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


FORMATS: list[Callable[[Bomb], bytes]] = [
    lambda bomb: pickle.dumps(bomb),
    lambda bomb: torch_file(bomb),
    lambda bomb: torch_file({"model": {"weight": torch.zeros(2)}, "step": bomb}),
]


@pytest.mark.parametrize("make", FORMATS, ids=["pickle", "torch", "inside"])
def test_checkpoints_and_weights_run_no_code(tmp_path, bomb, make):
    from groupwise.pipeline import checkpoint
    from groupwise.run import start_from
    from groupwise.training.checkpoint import load_checkpoint, load_newest, save_checkpoint
    from groupwise.training.ranks import Ranks

    path = tmp_path / "model.pt"
    path.write_bytes(make(bomb))
    attempts: list[Callable[[], object]] = [
        lambda: load_checkpoint(path),
        lambda: load_newest(path),
        lambda: checkpoint.read_weights(path, {"weight": "weight"}),
        lambda: start_from(torch.nn.Linear(2, 2), str(tmp_path)),
    ]
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "stage-0.pt").write_bytes(make(bomb))
    save_checkpoint(tmp_path / "checkpoint.pt", {"stages": 1, "folder": "checkpoint-1"})
    attempts.append(lambda: checkpoint.load(tmp_path / "checkpoint.pt", Ranks(), torch.device("cpu")))
    bare_pickle = make is FORMATS[0]  # not written by torch.save
    for attempt in attempts:
        with pytest.raises(UserError, match="truncated or altered" if bare_pickle else "could run code"):
            attempt()


def test_cifar_batches_are_opened_only_with_the_right_md5(tmp_path, bomb):
    from groupwise.data.cifar10 import read_batches
    from groupwise.torchvision_import import import_torchvision

    published = import_torchvision().datasets.CIFAR10
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, _ in (*published.train_list, *published.test_list, [published.meta["filename"], None]):
        (folder / name).write_bytes(pickle.dumps({"data": bomb, "labels": [0]}))
    with pytest.raises(UserError, match="incomplete, or not as published"):
        read_batches(tmp_path)


def test_models_of_the_hub_run_no_pickle_and_no_code(tmp_path, bomb):
    from groupwise.models.hub import load_tokenizer
    from groupwise.models.language import load_causal

    tokenizer = load_tokenizer(str(ROOT / "pretrained" / "gpt2_mini"))
    config = json.loads((ROOT / "pretrained" / "gpt2_mini" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, content in (("pytorch_model.bin", torch_file(bomb)), ("pytorch_model.bin", pickle.dumps(bomb))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="cannot be loaded"):
            load_causal(ModelConfig(source=str(tmp_path)), tokenizer)
    code = f"import pathlib\npathlib.Path({str(bomb.mark)!r}).touch()\n"
    (tmp_path / "modeling_bad.py").write_text(code)
    automatic = {"AutoConfig": "modeling_bad.Config", "AutoModelForCausalLM": "modeling_bad.Model"}
    automatic["AutoTokenizer"] = ["modeling_bad.Tokenizer", "modeling_bad.Tokenizer"]  # type: ignore[assignment]
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bad", "auto_map": automatic}))
    with pytest.raises(UserError):
        load_causal(ModelConfig(source=str(tmp_path)), tokenizer)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": automatic, "tokenizer_class": "Tokenizer"}))
    with pytest.raises(UserError):
        load_tokenizer(str(tmp_path))


def test_a_data_set_of_the_hub_runs_no_code(tmp_path, bomb):
    from groupwise.data.glue import load_glue

    folder = tmp_path / "glue_copy"
    folder.mkdir()
    (folder / "glue_copy.py").write_text(f"import pathlib\npathlib.Path({str(bomb.mark)!r}).touch()\n")
    (folder / "train.pkl").write_bytes(pickle.dumps(bomb))
    with pytest.raises(UserError, match="cannot be read from"):
        load_glue("sst2", tmp_path / "none", hub=str(folder))


# -- names stay inside their folder -----------------------------------------------------------------------------------


def test_shards_outside_of_the_models_folder_are_refused(tmp_path):
    from safetensors.torch import save_file

    from groupwise.pipeline.loading import INDEX, Weights

    save_file({"a": torch.zeros(2)}, tmp_path / "outside.safetensors")
    inside = tmp_path / "model"
    inside.mkdir()
    save_file({"a": torch.ones(2)}, inside / "inside.safetensors")
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        (inside / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(UserError, match="not of this folder"):
            Weights(inside).read("a")
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": "inside.safetensors"}}))
    assert Weights(inside).read("a").tolist() == [1, 1]


# -- the key of the noise ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _quick_runs():
    """No test here checks epsilon or the check before training, so both are made quick."""
    with rdp_alone(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("groupwise.build.verify", verify_once)
        yield


def smoke_folders(place: Path, *overrides: str) -> list[Path]:
    """Run at scale=smoke in `place`, with the quick accountant; return the folders of all runs in it."""
    given = ["task=cifar", "scale=smoke", "privacy.accountant=rdp", f"paths.results={place}", *overrides]
    run(compose_run(given, ROOT / "conf"))
    return sorted((place / "runs").iterdir())


def spellings(key: bytes) -> dict[str, bytes]:
    """The encodings in which a file or a log could contain a key."""
    urlsafe = base64.urlsafe_b64encode(key).rstrip(b"=")
    return {
        "raw": key,
        "text": key.decode("latin-1").encode(),  # as torch's pickles hold bytes
        "hex": key.hex().encode(),
        "base64": base64.b64encode(key).rstrip(b"="),
        "urlsafe": urlsafe,
        "number": str(int.from_bytes(key, "big")).encode(),
        "little": str(int.from_bytes(key, "little")).encode(),
        "repr": repr(key)[2:-1].encode(),
        "list": ", ".join(map(str, key)).encode(),
    }


def leaks(keys: dict[str, bytes], *texts: bytes) -> set[str]:
    """The keys that the texts contain, each with its encoding; hexadecimal digits in either case."""
    return {
        f"{name} as {how}"
        for name, key in keys.items()
        for how, spelled in spellings(key).items()
        for text in texts
        if spelled in text or (how == "hex" and spelled in text.lower())
    }


def secrets_of(key: bytes) -> dict[str, bytes]:
    source = NoiseSource(key)
    purposes = ("sampling", "randomness", "stage 0", "shard 0")
    digests = {f"of step {s}, stream {i}": source._digest(s, i) for s in (0, 1) for i in (-1, 0, 1)}
    return {"the key": key, **{purpose: source.derive(purpose) for purpose in purposes}, **digests}


KEY = hashlib.sha256(b"a key that the test knows").digest()


@pytest.mark.parametrize("how", spellings(KEY))
def test_a_leaked_key_is_found_in_every_encoding(how):
    assert leaks({"the key": KEY}, b"..." + spellings(KEY)[how] + b"...")
    assert not leaks({"the key": KEY}, b"..." + spellings(hashlib.sha256(KEY).digest())[how] + b"...")


@pytest.mark.parametrize("secure", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_only_checkpoints_of_a_run_contain_its_noise_key(tmp_path, monkeypatch, capfd, secure):
    monkeypatch.setattr("groupwise.privacy.noise.os.urandom", lambda count: KEY[:count])
    settings = ("clip=adaptive_layer", "train.checkpoint_every=0", "tracker=tensorboard", f"noise.secure={secure}")
    step = Trainer.step

    def interrupted(self: Trainer, number: int) -> list[float]:
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smoke_folders(tmp_path / "cut", *settings)
    (folder,) = (tmp_path / "cut" / "runs").iterdir()
    checkpoints = [path for path in folder.iterdir() if path.name.startswith("checkpoint")]
    assert checkpoints
    for path in checkpoints:
        assert leaks(secrets_of(KEY), path.read_bytes()) == {"the key as text"}  # so the search does find a key
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    others = [path for path in folder.rglob("*") if path.is_file() and path not in checkpoints]
    assert not leaks(secrets_of(KEY), *(path.read_bytes() for path in others))

    monkeypatch.setattr(Trainer, "step", step)
    smoke_folders(tmp_path / "cut", *settings)
    smoke_folders(tmp_path / "whole", *settings)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"DONE", "model.pt", "result.json"} <= {path.name for path in files}
    assert not [path for path in files if path.name.startswith("checkpoint")]
    printed = capfd.readouterr()
    texts = (path.read_bytes() for path in files)
    assert not leaks(secrets_of(KEY), *texts, printed.out.encode(), printed.err.encode())
    # The resumed run has the weights of the uninterrupted one, with secure noise too.
    models = [
        torch.load(next(tmp_path.glob(f"{name}/runs/*/model.pt")), weights_only=True) for name in ("cut", "whole")
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])


def test_secure_noise_differs_and_makes_a_run_of_its_own(tmp_path):
    settings = ("clip=flat", "train.steps=1", "debug.noise_seed=1")
    smoke_folders(tmp_path, *settings)
    first, second = smoke_folders(tmp_path, *settings, "noise.secure=true")
    models = [torch.load(folder / "model.pt", weights_only=True) for folder in (first, second)]
    assert not all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_run_with_a_known_key_is_marked_as_not_private(tmp_path, capfd):
    (folder,) = smoke_folders(tmp_path, "clip=flat", "train.steps=1", "debug.noise_seed=1")
    assert "NOT PRIVATE" in capfd.readouterr().out
    assert json.loads((folder / "privacy.json").read_text())["private"] is False
    assert json.loads((folder / "seeds.json").read_text()) == {"seed": 0, "noise_seed": 1, "noise_is_secret": False}
