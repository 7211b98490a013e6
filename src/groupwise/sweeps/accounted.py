"""Plans an accounted search: its settings, their noise, its cost, and what is refused.

``python run.py -m +sweep=NAME tuning=accounted``. The argument for its ε is in :mod:`groupwise.privacy.tuning`;
:mod:`groupwise.sweeps.secret_runs` runs it.

Scores. ε covers the training examples. A score on examples that ε does not cover is post-processing of the model. A
score on training examples is a further release without noise: with ``data.holdout``, the held-out part would decide
which model is released and reveal its accuracy on them, at no finite ε. So a sweep's ``data.holdout`` is ignored: that
part is trained on, and the score is on the validation set. On the command line it is refused.
"""

import copy
import hashlib
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.config.checks import value_at
from groupwise.config.identity import stable_config
from groupwise.config.schema import RunConfig, TuningConfig
from groupwise.errors import UserError
from groupwise.privacy.plan import WIDTH
from groupwise.privacy.tuning import (
    Poisson,
    RunCount,
    SearchCost,
    Training,
    TruncatedNegativeBinomial,
    calibrate_search,
    search_cost,
)
from groupwise.sweeps.prepare import PlannedSweep
from groupwise.training.record import neighbours_of

SAME = ("task", "own_task", "data.name", "data.train_limit", "data.train_file", "data.hub")
"""Keys that all settings of a search share, as ε is about one set of training examples."""
ONE_VALUE = ("privacy.delta", "privacy.accountant", "tuning", "overwrite", "paths.results")


@dataclass(frozen=True)
class Setting:
    """One cell of the sweep.

    Args:
        name: its words. config: of a run under it, the noise included. training: its mechanism.
    """

    name: str
    config: RunConfig
    training: Training


@dataclass(frozen=True)
class Search:
    """An accounted search, ready to be drawn.

    Args:
        examples: N. key: the hash of the whole request, which names the folder.
    """

    name: str
    folder: Path
    key: str
    settings: tuple[Setting, ...]
    count: RunCount
    cost: SearchCost
    examples: int
    delta: float
    tuning: TuningConfig
    overwrite: bool
    notes: tuple[str, ...] = ()

    def statement(self) -> str:
        """The search and its cost in words; independent of the draws."""
        many = f"all {len(self.settings)} settings"
        lines = [
            f"Search: {self.count.mean:.4g} runs expected ({self.count}), each under one of {len(self.settings)} "
            "settings drawn at random. How many they are stays secret, and the best alone is released.",
            f"  one run         epsilon = {self.cost.one_run:.4g}",
            f"  {many:15} epsilon = {self.cost.grid:.4g} if one run of each were looked at",
            f"  this search     epsilon = {self.cost.search:.4g} at delta = {self.delta:g} for adding or removing "
            f"{neighbours_of(self.settings[0].config)}",
            "  The score is of validation examples, which epsilon does not cover, and leans upwards as the best of "
            "several. Not covered: how long the search takes, which tells how many runs there were.",
            *(f"  {note}" for note in self.notes),
        ]
        if self.cost.grid <= self.cost.search:
            lines.append("  So few settings cost less if all of them are run and shown, without tuning=accounted.")
        return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines)


def plan_search(planned: PlannedSweep, overrides: Sequence[str]) -> Search:
    """Check all cells and give them their noise; loads the data of the first to learn N, and writes nothing.

    Args:
        overrides: of the command line, ``-m`` left out.

    Raises:
        UserError: settings without an ε, that release more than the best run, or that cannot reach their target.
    """
    cells = planned.cells or ()
    configs = [copy.deepcopy(cell.config) for cell in cells]
    for problem in [*_command_line(overrides), *_together(configs)]:
        raise UserError(f"tuning=accounted: {problem}")
    for cell, config in zip(cells, configs, strict=True):
        for problem in _refused(config):
            raise UserError(f"tuning=accounted, in the cell {cell.name}: {problem}")
    notes = _without_holdout(configs)
    first = configs[0]
    key = hashlib.sha256(json.dumps([stable_config(config) for config in configs]).encode()).hexdigest()
    count = count_of(first.tuning, len(configs))
    examples = _examples(configs)
    trainings, delta = _trainings(configs, count, examples)
    return Search(
        planned.name,
        Path(first.paths.results).expanduser() / "searches" / f"{planned.name}-{key[:12]}",
        key,
        tuple(
            Setting(_name(cell.name), _with_noise(config, training), training)
            for cell, config, training in zip(cells, configs, trainings, strict=True)
        ),
        count,
        search_cost(trainings, count, delta, first.privacy.accountant),
        examples,
        delta,
        first.tuning,
        first.overwrite,
        tuple(notes),
    )


def count_of(tuning: TuningConfig, settings: int) -> RunCount:
    """The law of K; raises `UserError` for invalid parameters."""
    runs = tuning.runs
    if tuning.gamma is not None:
        if runs is not None or tuning.law == "poisson":
            raise UserError(
                f"tuning.gamma={tuning.gamma:g} sets the expected number of runs of a negative binomial law: leave it "
                "out, or tuning.runs and tuning.law."
            )
        return TruncatedNegativeBinomial(tuning.eta, tuning.gamma)
    expected = float(settings) if runs is None else runs
    if tuning.law == "poisson":
        return Poisson(expected)
    if expected <= 1.0:
        raise UserError("tuning.law=negative_binomial with one expected run is not a search: give tuning.runs above 1.")
    return TruncatedNegativeBinomial.with_mean(tuning.eta, expected)


def _command_line(overrides: Sequence[str]) -> Iterator[str]:
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key == "hydra/launcher" and value != "basic":
            yield "its runs go one after the other, as a queue would show how many there are: leave hydra/launcher out."
        if key == "data.holdout" and value != "null":
            yield (
                f"{word} would score on training examples, which no noise protects there: leave it out, and the "
                "validation set is scored on."
            )


def _together(configs: Sequence[RunConfig]) -> Iterator[str]:
    """Problems with keys that all cells must share."""
    first = configs[0]
    # to_run_config has left epsilon None where the noise is given
    budget = ["privacy.epsilon"] if first.tuning.target == "search" else []
    for key in [*SAME, *ONE_VALUE, *budget]:
        values = {repr(value_at(config, key)): value_at(config, key) for config in configs}
        if len(values) > 1:
            several = ", ".join(map(str, list(values.values())[:4]))
            yield f"{key} is {several} in its cells, but a search needs one value: give it on the command line."


def _refused(config: RunConfig) -> Iterator[str]:
    """Settings that have no RDP curve, are predictable, or release more than the best run."""
    privacy, tuning = config.privacy, config.tuning
    if config.clip.grouping == "none" or privacy.epsilon == math.inf or privacy.noise_multiplier == 0:
        yield "a run without noise has no epsilon, nor has a search: choose a clipping mode and a finite budget."
    if privacy.sampling != "poisson":
        yield f"privacy.sampling={privacy.sampling} has no valid RDP curve: use privacy=poisson."
    if config.debug.noise_seed is not None or config.data.public:
        which, other = ("data.public=true", "false") if config.data.public else ("debug.noise_seed", "null")
        secret = f"{which.split('=')[0]}={other}"
        yield f"{which} makes the noise predictable, so nothing is private: give {secret}."
    if config.tracker.name != "files":
        yield f"tracker={config.tracker.name} would show every run, and only the best may be: use tracker=files."
    asked = {
        "explain": config.explain,
        "export": config.export,
        "resume": config.resume,
        "eval.shots": config.eval.shots,
    }
    for key, value in asked.items():
        if value not in (None, False):
            yield f"{key} is of a single run: leave it out, and give it the released one afterwards."
    if config.pipeline.stages > 1:
        yield f"pipeline.stages={config.pipeline.stages} is not for a search: give one stage."
    if config.own_task and not tuning.outside:
        yield (
            f"task={config.task} is your own, and what it validates on may be training examples: give "
            "tuning.outside=true if none of it is."
        )


def _without_holdout(configs: Sequence[RunConfig]) -> list[str]:
    shares = {config.data.holdout for config in configs if config.data.holdout}
    for config in configs:
        config.data.holdout = None
    given = ", ".join(f"{share:g}" for share in sorted(shares))
    return [f"The sweep's data.holdout={given} is ignored: a score on training examples has no epsilon."] * bool(shares)


def _name(name: str) -> str:
    return " ".join(word for word in name.split() if not word.startswith("data.holdout="))


def _examples(configs: Sequence[RunConfig]) -> int:
    """N, from the data themselves; torch is imported only here.

    Raises:
        UserError: a cell starts from weights whose own budget would have to be added.
    """
    import torch

    from groupwise.processes.environment import find_place
    from groupwise.run import earlier_runs_of, require_gpu_for_the_paper
    from groupwise.tasks import make_task
    from groupwise.training.earlier_runs import counted

    config = configs[0]
    place = find_place(config)
    if place is not None and place.world > 1:
        raise UserError("tuning=accounted: one process draws for all, so start it without torchrun or srun.")
    require_gpu_for_the_paper(config)
    task = make_task(config, torch.device("cpu"))
    earlier = [run for each in configs for run in earlier_runs_of(each)]
    added = [*counted(earlier, config.task, task.describe_data()), *(run for run in earlier if not run["public"])]
    if added:
        raise UserError(
            f"tuning=accounted: a cell starts from weights of {added[0]['run']}, whose budget would have to be added: "
            "start from public ones, or give one run without tuning."
        )
    return int(task.train_size)


def _trainings(configs: Sequence[RunConfig], count: RunCount, examples: int) -> tuple[list[Training], float]:
    """Each setting's mechanism, and the δ of all."""
    from groupwise.run import plan_run

    epsilon = configs[0].privacy.epsilon
    to_search = configs[0].tuning.target == "search" and epsilon is not None
    trainings = []
    for config in configs:
        asked = copy.deepcopy(config)
        if to_search:  # σ is found below: this plan is for B, T and δ
            asked.privacy = replace(asked.privacy, epsilon=None, noise_multiplier=1.0, accountant="rdp")
        plan = plan_run(asked, examples, 1)
        trainings.append(Training(plan.noise_multiplier, plan.sample_rate, plan.steps))
    if to_search:
        assert epsilon is not None
        rates = [(training.sample_rate, training.steps) for training in trainings]
        sigmas = calibrate_search(rates, count, epsilon, plan.delta)
        trainings = [Training(sigma, *of) for of, sigma in zip(rates, sigmas, strict=True)]
    return trainings, plan.delta


def _with_noise(config: RunConfig, training: Training) -> RunConfig:
    """A single run's configuration, with the noise that the search needs and without the search's settings."""
    run = copy.deepcopy(config)
    run.privacy.noise_multiplier, run.privacy.epsilon = training.noise_multiplier, None
    run.tuning, run.overwrite = TuningConfig(), False
    return run
