"""Plans an accounted search: its settings, their noise, its cost, and what is refused.

``python run.py -m +sweep=NAME tuning=accounted``. The argument for its ε is in :mod:`groupwise.privacy.tuning`;
:mod:`groupwise.sweeps.secret_runs` runs it.

Scores. ε covers the training examples. A score on examples that ε does not cover is post-processing of the model. A
score on training examples is a further release without noise: with ``data.holdout``, the held-out part would decide
which model is released and reveal its accuracy on them, at no finite ε. So ``data.holdout`` is refused.
"""

import copy
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.config.checks import value_at
from groupwise.config.identity import stable_config
from groupwise.config.schema import RunConfig, TuningConfig
from groupwise.errors import UserError
from groupwise.privacy.plan import folded
from groupwise.privacy.tuning import SearchCost, Training, TruncatedNegativeBinomial, calibrate_search, search_cost
from groupwise.sweeps.prepare import PlannedSweep
from groupwise.training.record import neighbours_of

SAME = (
    *("task", "own_task", "data.name", "data.train_limit", "data.train_file", "data.hub"),
    *("privacy.epsilon", "privacy.delta", "privacy.accountant", "tuning", "paths.results"),
)
"""Keys that all settings of a search share: ε is about one set of training examples, and one budget."""


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
        key: the hash of the whole request, which names the folder. count: the law of K. examples: N.
    """

    folder: Path
    key: str
    settings: tuple[Setting, ...]
    count: TruncatedNegativeBinomial
    cost: SearchCost
    examples: int
    delta: float

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
        ]
        if self.cost.grid <= self.cost.search:
            lines.append("  So few settings cost less if all of them are run and shown, without tuning=accounted.")
        return "\n".join(map(folded, lines))


def plan_search(planned: PlannedSweep, overrides: Sequence[str]) -> Search:
    """Check all cells and give them their noise; loads the data of the first to learn N, and writes nothing.

    Args:
        overrides: of the command line, ``-m`` left out.

    Raises:
        UserError: settings without an ε, that release more than the best run, or that cannot reach their target.
    """
    cells = planned.cells or ()
    if any(word.startswith("hydra/launcher=") and not word.endswith("=basic") for word in overrides):
        raise UserError(
            "tuning=accounted: its runs go one after the other, as a queue would show how many there are: leave "
            "hydra/launcher out."
        )
    for key in SAME:
        values = {repr(value): value for value in (value_at(cell.config, key) for cell in cells)}
        if len(values) > 1:
            several = ", ".join(map(str, list(values.values())[:4]))
            raise UserError(
                f"tuning=accounted: {key} is {several} in its cells, but a search needs one value: give it on the "
                "command line."
            )
    for cell in cells:
        for problem in _refused(cell.config):
            raise UserError(f"tuning=accounted, in the cell {cell.name}: {problem}")
    configs = [cell.config for cell in cells]
    first = configs[0]
    tuning = first.tuning
    key = hashlib.sha256(json.dumps([stable_config(config) for config in configs]).encode()).hexdigest()
    count = TruncatedNegativeBinomial.with_mean(tuning.eta, len(cells) if tuning.runs is None else tuning.runs)
    examples = _examples(configs)
    trainings, delta = _trainings(configs, count, examples)
    cost = search_cost(trainings, count, delta, first.privacy.accountant)
    settings = []
    for cell, training in zip(cells, trainings, strict=True):
        run = copy.deepcopy(cell.config)  # a single run's, with the noise that the search needs
        run.privacy.noise_multiplier, run.privacy.epsilon = training.noise_multiplier, None
        run.tuning = TuningConfig()
        settings.append(Setting(cell.name, run, training))
    folder = Path(first.paths.results).expanduser() / "searches" / f"{planned.name}-{key[:12]}"
    return Search(folder, key, tuple(settings), count, cost, examples, delta)


def _refused(config: RunConfig) -> Iterator[str]:
    """Settings that have no RDP curve, are predictable, or release more than the best run."""
    privacy, data = config.privacy, config.data
    if config.clip.grouping == "none" or privacy.epsilon == math.inf or privacy.noise_multiplier == 0:
        yield "a run without noise has no epsilon, nor has a search: choose a clipping mode and a finite budget."
    if privacy.sampling != "poisson":
        yield f"privacy.sampling={privacy.sampling} has no valid RDP curve: use privacy=poisson."
    if data.public:
        yield "data.public=true makes the noise predictable, so nothing is private: give data.public=false."
    if config.debug.noise_seed is not None:
        yield "debug.noise_seed makes the noise predictable, so nothing is private: give debug.noise_seed=null."
    if data.holdout:
        yield (
            f"data.holdout={data.holdout:g} would score on training examples, which no noise protects there: give "
            "data.holdout=null, and the validation set is scored on."
        )
    if config.overwrite:
        yield (
            "overwrite=true would draw again, and each draw is a release whose epsilon adds to the others': leave it "
            "out, or give another paths.results and add the two."
        )
    if config.tracker.name != "files":
        yield f"tracker={config.tracker.name} would show every run, and only the best may be: use tracker=files."
    for key in ("explain", "export", "resume", "eval.shots"):
        if value_at(config, key) not in (None, False):
            yield f"{key} is of a single run: leave it out, and give it the released one afterwards."
    if config.pipeline.stages > 1:
        yield f"pipeline.stages={config.pipeline.stages} is not for a search: give one stage."
    if config.own_task and not config.tuning.outside:
        yield (
            f"task={config.task} is your own, and what it validates on may be training examples: give "
            "tuning.outside=true if none of it is."
        )


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


def _trainings(
    configs: Sequence[RunConfig], count: TruncatedNegativeBinomial, examples: int
) -> tuple[list[Training], float]:
    """Each setting's mechanism, and the δ of all; ``privacy.epsilon`` is the whole search's."""
    from groupwise.run import plan_run

    trainings = []
    for config in configs:
        sigma = config.privacy.noise_multiplier or 1.0  # where ε is given, σ is found below
        given = replace(config, privacy=replace(config.privacy, epsilon=None, noise_multiplier=sigma, accountant="rdp"))
        plan = plan_run(given, examples, 1)
        trainings.append(Training(sigma, plan.sample_rate, plan.steps))
    epsilon = configs[0].privacy.epsilon
    if epsilon is not None:
        rates = [(training.sample_rate, training.steps) for training in trainings]
        sigmas = calibrate_search(rates, count, epsilon, plan.delta)
        trainings = [Training(sigma, *of) for of, sigma in zip(rates, sigmas, strict=True)]
    return trainings, plan.delta
