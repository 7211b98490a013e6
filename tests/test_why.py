"""`--why` names every line that wrote a key, the winner last, and what it shows is what a run gets."""

import re
import sys
from pathlib import Path

import pytest

from groupwise.cli.main import launch
from groupwise.cli.why import why
from groupwise.config.checks import value_at
from groupwise.config.identity import flat_config
from groupwise.sweeps.cells import text
from tests.combinations import CELLS, CONF, pairwise, run

ROOT = CONF.parent


def told(*words: str) -> dict[str, tuple[str, list[str]]]:
    """Key -> its value, and the lines of its chain."""
    found: dict[str, tuple[str, list[str]]] = {}
    key = ""
    for line in why(["--why", *words], CONF).splitlines():
        if line.startswith("  "):
            found[key][1].append(line.strip())
        else:
            key, _, value = line.partition("=")
            found[key] = (value, [])
    return found


def said_at(place: str) -> str:
    """The line of a file that a place names."""
    file, _, line = place.partition(":")
    return (ROOT / file).read_text().splitlines()[int(line) - 1]


def test_the_chain_of_a_key_goes_from_the_schema_to_the_winner() -> None:
    value, chain = told("clip.threshold", "task=sst2", "scale=mini", "clip=fixed_layer")["clip.threshold"]
    values, places = zip(*(re.split(r"  +", line)[:2] for line in chain), strict=True)
    assert value == "1"
    assert values == ("1", "${at:${model.name},{roberta_large:1.0,other:0.1}}", "1")
    files = [place.partition(":")[0] for place in places]
    assert files == ["src/groupwise/config/schema.py", "conf/recipe/glue.yaml", "conf/scales/glue.yaml"]
    assert all("threshold: " in said_at(place) for place in places)
    assert [line.endswith("<- wins") for line in chain] == [False, False, True]


def test_the_command_line_comes_last_and_an_option_names_its_file() -> None:
    found = told(
        "clip.threshold", "optim", "noise", "scale", "clip.threshold=3", "optim=adam", "scale=mini", "noise=weighted"
    )
    assert found["clip.threshold"][1][-1] == "3  the command line, clip.threshold=3  <- wins"
    assert "conf/optim/adam.yaml" in found["optim.learning_rate"][1][-1]
    assert "conf/noise/weighted.yaml" in found["noise.allocation"][1][-1]
    assert found["scale"] == ("mini", [found["scale"][1][0], "mini   the command line, scale=mini  <- wins"])


def test_an_epsilon_that_follows_is_said_to() -> None:
    value, chain = told("privacy.epsilon", "privacy.noise_multiplier=2")["privacy.epsilon"]
    assert value == "null" and "follows from privacy.noise_multiplier" in chain[-1]


def test_a_section_is_all_of_its_keys_and_a_sweep_may_write_one() -> None:
    found = told("data", "model.shape", "train.sample_rate", "+sweep=search_sst2_optuna", "task=sst2")
    assert {f"data.{name}" for name in ("name", "holdout", "max_length")} <= {*found}
    assert "sweeps/search_sst2_optuna.yaml" in found["data.holdout"][1][-1]
    assert found["model.shape.num_hidden_layers"][0] == "12" and "model.shape" not in found
    assert list(found)[-1] == "train.sample_rate"


@pytest.mark.parametrize("cell", pairwise(CELLS)[::10], ids=" ".join)
def test_every_value_is_that_of_the_run_and_every_line_holds_its_key(cell: tuple[str, str, str]) -> None:
    settings = [f"{key}={value}" for key, value in zip(("task", "clip", "scale"), cell, strict=True)]
    settings.append("train.steps=3")
    config = run(*settings)
    asked = [key for key in flat_config(config) if "." in key]
    for key, (value, chain) in told(*asked, *settings).items():
        if not key.startswith("model.shape"):
            assert value == text(value_at(config, key)), key
        for line in chain:
            place = re.split(r"  +", line)[1]
            last = key.rpartition(".")[2]
            assert last in (place if place.startswith("the command line") else said_at(place)), line


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("clip.treshold", "did you mean clip.threshold?"),
        ("optm", "did you mean optim?"),
        ("task=sst2", "was given no key"),
        ("clip.threshold -m", "and not -m"),
        ("clip.threshold seed=0,1", "seed=0,1 gives several values"),
        ("clip.threshold task=sst3", "task=sst3 is not one of"),
        ("clip.threshold clip.treshold=3", "did you mean clip.threshold?"),
        ("model.shape.n_layer task=cifar", "ask for model.shape"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--why", *words.split()])
    assert launch(CONF, lambda config: pytest.fail("it trains")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and sentence in err


def test_it_prints_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--why", "clip.target_quantile", "task=sst2"])
    assert launch(CONF, lambda config: pytest.fail("it trains")) == 0
    assert capsys.readouterr().out.startswith("clip.target_quantile=0.85\n")
    assert list(tmp_path.iterdir()) == []
