"""Draws an accounted search once, runs it in secret, releases the best run alone and deletes the others.

`results/searches/<sweep>-<hash>/`:

    unreleased/    for the owner alone: search.json (K, and each run's setting), the runs' records and logs
    released/      model.pt, config.yaml and release.json of the best run
    DONE

K and the settings come from the operating system's randomness and are on disk before the first run begins, so a search
that was killed resumes with the same ones. Drawing again for a better result would change the law of K that is
accounted for: the ε of both draws adds up.
"""

import copy
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from groupwise.atomic import lock, remove, write_atomically, write_json, write_text
from groupwise.config.identity import config_hash, save_config
from groupwise.config.schema import PathsConfig, RunConfig
from groupwise.errors import UserError
from groupwise.privacy.plan import folded
from groupwise.privacy.tuning import TruncatedNegativeBinomial
from groupwise.rows import HELD_OUT
from groupwise.sweeps.accounted import Search, Setting
from groupwise.sweeps.best import HEADLINES, lower_is_better
from groupwise.sweeps.collect import result_row
from groupwise.sweeps.folder import output_to
from groupwise.training.record import neighbours_of

UNRELEASED, STATE, RELEASED, RELEASE = "unreleased", "search.json", "released", "release.json"
WARNING = (
    "NOT TO BE RELEASED. The epsilon of this search covers the best run alone. How many runs there are, under which\n"
    "settings, and what came of them would cost more, and is for nobody but the owner of the data.\n"
)


def run_search(search: Search, train: Callable[[RunConfig], Any]) -> list[str]:
    """Run all runs that are not done, release the best, and return lines about it.

    Args:
        train: runs one configuration to its record.

    Raises:
        UserError: the search must not continue (a lost draw, other data), or a run was refused: leaving it out would
            change the law of K.
    """
    folder = search.folder
    folder.mkdir(parents=True, exist_ok=True)
    held = lock(folder / ".lock")
    if held is None:
        raise UserError(f"another process runs the search in {folder}: wait for it to end.")
    with held:
        if not (folder / "DONE").is_file():
            settings = _drawn(search)
            notice = f"Running in secret; do not release {folder / UNRELEASED}."
            print(folded(notice), flush=True)
            _release(search, [(_score(row), setting, run) for row, setting, run in _runs(search, settings, train)])
        shutil.rmtree(folder / UNRELEASED, ignore_errors=True)
        return _released(folder)


def _drawn(search: Search) -> list[int]:
    """Each run's setting, from secret randomness; on disk before it is used, and read from there if it is.

    Raises:
        UserError: the draw on disk is gone, or of another search or number of examples.
    """
    unreleased = search.folder / UNRELEASED
    path = unreleased / STATE
    sigmas = [f"{setting.training.noise_multiplier:.9g}" for setting in search.settings]
    valid_for = [search.key, search.examples, search.delta, str(search.count), *sigmas]
    if not path.is_file():
        if any(unreleased.glob("[0-9]*")):  # logs and records of runs
            raise UserError(f"{path} is gone, without which the search cannot go on with the same draw: restore it.")
        unreleased.mkdir(mode=0o700, exist_ok=True)
        write_text(unreleased / "NOT-TO-BE-RELEASED.txt", WARNING)
        drawn = {"settings": draw_settings(search.count, len(search.settings)), "valid_for": valid_for}
        write_atomically(path, lambda file: file.write(json.dumps(drawn).encode()))
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        settings, same = state["settings"], state["valid_for"] == valid_for
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} was changed after the search wrote it: restore it.") from error
    if not same:
        raise UserError(
            f"{search.folder} was begun with other data, noise or libraries: restore those, or give another "
            "paths.results for another release, whose epsilon adds to the first."
        )
    return settings


def draw_settings(count: TruncatedNegativeBinomial, settings: int) -> list[int]:
    """K numbers below `settings`, each as likely as any other, with replacement, from secret randomness."""
    return [secrets.randbelow(settings) for _ in range(count.draw())]


def _runs(
    search: Search, settings: list[int], train: Callable[[RunConfig], Any]
) -> Iterator[tuple[dict[str, Any], Setting, Path]]:
    """The row and the record of each run, in the order of the draw; finished runs are read."""
    unreleased = search.folder / UNRELEASED
    for number, of in enumerate(settings):
        setting = search.settings[of]
        config = copy.deepcopy(setting.config)
        config.paths.results = str(unreleased / str(number))  # a folder each: two runs may be under one setting
        digest = config_hash(config)
        run = unreleased / str(number) / "runs" / digest[:12]
        row = result_row(run, config, digest)
        if row is None:
            with output_to(unreleased / f"{number}.log"):
                train(config)
            row = result_row(run, config, digest)
        if row is None:
            raise UserError(f"a run of the search left no result in {run}: give the same command again.")
        _check(search, setting, row)
        yield row, setting, run


def _check(search: Search, setting: Setting, row: Mapping[str, Any]) -> None:
    """Refuse a run that differs from the one that was accounted for."""
    training = setting.training
    promised = {
        "plan.private": True,
        "plan.dataset_size": search.examples,
        "plan.steps": training.steps,
        "plan.delta": search.delta,
        "plan.noise_multiplier": training.noise_multiplier,
        "plan.expected_batch_size": training.sample_rate * search.examples,
    }
    for key, value in promised.items():
        found = row.get(key)
        if not isinstance(found, int | float) or not math.isclose(found, value, rel_tol=1e-9):
            raise UserError(f"a run of the search has {key} = {found}, but {value} was accounted for: release nothing.")


def _headline(row: Mapping[str, Any]) -> str:
    name = next((name for name in HEADLINES if name in row), None)
    if name is None:
        raise UserError(f"the runs have none of {', '.join(HEADLINES)}, so there is no best one: use another task.")
    return name


def _score(row: Mapping[str, Any]) -> float:
    """Larger is better; a value that is not finite is worst, as no run may be left out."""
    name = _headline(row)
    value = -float(row[name]) if lower_is_better(name) else float(row[name])
    return value if math.isfinite(value) else -math.inf


def _release(search: Search, scored: list[tuple[float, Setting, Path]]) -> None:
    """Copy the first of the best runs to the released folder, and nothing of the others."""
    partial = search.folder / f".{RELEASED}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    _, setting, run = max(scored, key=lambda one: one[0])
    row = json.loads((run / "result.json").read_text(encoding="utf-8"))
    public = copy.deepcopy(setting.config)
    public.paths = PathsConfig()
    write_text(partial / "config.yaml", save_config(public))
    shutil.copyfile(run / "model.pt", partial / "model.pt")  # not its times, which reveal what came after
    privacy = {
        "private": True,
        "epsilon": search.cost.search,
        "delta": search.delta,
        "neighbours_differ_by": neighbours_of(setting.config),
        "training_examples": search.examples,
        "runs_expected": search.count.mean,
        "law": str(search.count),
        "settings": [setting.name for setting in search.settings],
        "epsilon_of_one_run": search.cost.one_run,
        "epsilon_of_all_settings": search.cost.grid,
    }
    metrics = {key: value for key, value in row.items() if key.startswith(HELD_OUT)}
    found = {"setting": setting.name, "score": _headline(row), "metrics": metrics, "privacy": privacy}
    write_json(partial / RELEASE, found)
    if os.path.lexists(search.folder / RELEASED):
        remove(search.folder / RELEASED)
    os.replace(partial, search.folder / RELEASED)
    write_text(search.folder / "DONE", "")


def _released(folder: Path) -> list[str]:
    """The release, as the last lines of the command."""
    try:
        found = json.loads((folder / RELEASED / RELEASE).read_text(encoding="utf-8"))
        privacy, metrics = found["privacy"], found["metrics"]
        lines = [
            f"Released: {found['setting']}",
            "  " + "  ".join(f"{key} {value:.4g}" for key, value in metrics.items()),
            f"  epsilon = {privacy['epsilon']:.4g} at delta = {privacy['delta']:g}, for the whole search",
            f"  {folder / RELEASED}",
        ]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder / RELEASED} was changed after the search wrote it: restore it.") from error
    return [folded(line, "    ") for line in lines]
