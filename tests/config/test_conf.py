"""Every file of `conf/` says something of its own, and whatever it says wins over all else in some configuration."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import initialize_config_dir

from groupwise.cli.why import statements
from groupwise.config.compose import register
from groupwise.config.tables import Part, Tables, file_part
from tests.combinations import CELLS, CONF, FAMILIES

OPTIONS = sorted(
    str(file.relative_to(CONF).with_suffix(""))
    for file in CONF.rglob("*.yaml")
    if file.relative_to(CONF).parts[0] not in ("recipe", "scales", "sweep", "hydra", "config.yaml")
)


def parts(conf: Path) -> Iterator[tuple[str, Part]]:
    """All that `conf` is composed of, each by its name."""
    tables = Tables(conf)
    names = ["config", *OPTIONS]
    for family in tables.parts("family"):
        scales = tables.parts(f"scales/{family}")
        names += [f"family/{family}"]
        names += [f"recipe/{family}/{mode}" for mode in tables.parts(f"recipe/{family}")]
        names += [f"scales/{family}/{scale}" for scale in scales]
        names += [
            f"exceptions/{family}/{s}/{mode}" for s in scales for mode in tables.parts(f"exceptions/{family}/{s}")
        ]
    for name in names:
        yield name, tables.part(name) or file_part(conf, name)


def configurations(name: str) -> Iterator[tuple[str, ...]]:
    """All valid choices of task, mode and scale that take the part in, and any other option by itself."""
    kind, *rest = name.split("/")
    if "own" in rest and kind != "model":  # the family of a task of the user's own, which no option of conf/ takes
        scales = [rest[1]] if kind in ("scales", "exceptions") else Tables(CONF).parts("scales/own")
        modes = [rest[-1]] if kind in ("recipe", "exceptions") else Tables(CONF).parts("recipe/own")
        yield from (("family=own", f"clip={clip}", f"scale={scale}") for scale in scales for clip in modes)
    elif kind in ("clip", "task", "config", "family", "recipe", "scales", "exceptions"):
        for task, clip, scale in CELLS:
            has = {
                "family": FAMILIES[task],
                "recipe": f"{FAMILIES[task]}/{clip}",
                "scales": f"{FAMILIES[task]}/{scale}",
            }
            has |= {"exceptions": f"{FAMILIES[task]}/{scale}/{clip}", "clip": clip, "task": task, "config": ""}
            if has[kind] == "/".join(rest):
                yield f"task={task}", f"clip={clip}", f"scale={scale}"
    if kind in ("model", "privacy", "optim", "noise", "tracker", "tuning"):
        yield (name.replace("/", "="),)


def never_win(conf: Path) -> list[str]:
    """The places and keys of `conf` that are overruled wherever they are read; the first that wins ends the search."""
    left: dict[str, set[str]] = {}
    for name, part in parts(conf):
        said = {f"{part.file.relative_to(conf)}:{line} {keys[-1]}" for keys, _, line in part.statements()}
        left[name] = {place for place in said if not place.startswith("config.yaml:") or place.endswith(" data")}
    won, composed, seen = set[str](), set[tuple[str, ...]](), set[str]()
    register()
    with initialize_config_dir(str(conf), version_base="1.3"):
        for name, said in reversed(left.items()):  # a recipe or scale brings its mode, task and family along
            choices = sorted(configurations(name), key=lambda choice: len(seen.intersection(choice)))
            for overrides in choices:
                if said <= won:
                    break
                if overrides in composed:
                    continue
                composed.add(overrides)
                seen.update(overrides)
                last = {statement.key: statement for statement in statements(overrides, conf)}
                for key, winner in last.items():
                    won.add(f"{winner.place.removeprefix(f'{conf.name}/')} {key.rpartition('.')[2]}")
    return sorted(set().union(*left.values()) - won)


def test_whatever_a_file_says_wins_in_some_configuration() -> None:
    assert never_win(CONF) == []


@pytest.mark.slow  # it looks through all configurations in vain
def test_what_never_wins_is_found(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf, ignore=shutil.ignore_patterns("sweep"))
    with (conf / "clip" / "adaptive_layer.yaml").open("a") as file:
        file.write("target_quantile: 0.123\n")
    assert never_win(conf) == ["clip/adaptive_layer.yaml:7 target_quantile"]


@pytest.mark.parametrize("name", OPTIONS)
def test_no_file_only_inherits(name: str) -> None:
    assert file_part(CONF, name).values
