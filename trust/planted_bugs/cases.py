"""Each bug with a worst case that reveals it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.audit.two_worlds import Release, Score
from groupwise.config.schema import ClipConfig
from groupwise.privacy import PrivacyPlan
from trust.planted_bugs import bugs
from trust.planted_bugs.bugs import Bug
from trust.planted_bugs.worst import Worst, WorstCounts

WIDTH = 4


@dataclass(frozen=True)
class Case:
    """A bug, and how it is caught.

    Args:
        name: for the command line. bug: a description. how: the data sets and the attack, described without commas.
        plant: the patch. worst: builds the worlds. plays: the number of plays of each world.
        factor: the factor by which the noise of a full-batch Gaussian release is too small, if that is the whole bug.
    """

    name: str
    bug: str
    how: str
    plant: Bug
    worst: Worst | WorstCounts
    plays: int = 500
    factor: float | None = None


def _fixed(groups: int = 1) -> ClipConfig:
    return ClipConfig(grouping="layer", policy="fixed", threshold=math.sqrt(groups), rescale=False)


def _adaptive(budget: float, quantile: float = 0.5, rate: float = 1.0) -> ClipConfig:
    return ClipConfig(
        grouping="flat",
        rescale=False,
        threshold=1.0,
        quantile_budget=budget,
        target_quantile=quantile,
        quantile_learning_rate=rate,
    )


def _along(first: float = 1.0, layers: int = 1, uses: int = 1, width: int = WIDTH) -> Tensor:
    """Gradients (K, U, width) of length `first` along the first axis, in every layer and use."""
    gradient = torch.zeros(layers, uses, width, dtype=torch.float64)
    gradient[..., 0] = first
    return gradient


def _copies(count: int, gradient: Tensor) -> Tensor:
    return gradient.expand(count, *gradient.shape).clone()


def _projection(direction: Tensor) -> Callable[[PrivacyPlan], Score]:
    """Σ_steps ⟨update, direction⟩; direction (P,)."""
    return lambda plan: lambda releases: sum(float(release.update @ direction) for release in releases)


def _on_first_axis(layers: int = 1) -> Callable[[PrivacyPlan], Score]:
    return _projection(_along(layers=layers).flatten())


def _two_steps_apart(plan: PrivacyPlan) -> Score:
    return lambda releases: abs(float(releases[0].update[0] - releases[1].update[0]))


def _steps_with_a_move(plan: PrivacyPlan) -> Score:
    return lambda releases: float(sum(bool(release.update.any()) for release in releases))


def _narrow(plan: PrivacyPlan) -> Score:
    return lambda releases: -float(releases[0].update.norm())


def _risen(plan: PrivacyPlan) -> Score:
    return lambda releases: float(releases[-1].thresholds.log().sum())


def _fallen(plan: PrivacyPlan) -> Score:
    return lambda releases: -float(releases[-1].thresholds.log().sum())


def _shuffle_likelihood(plan: PrivacyPlan) -> Score:
    """Log likelihood ratio of the sums: one batch of the epoch is 2 above the others, or the last is 1 above."""
    full, variance = round(plan.expected_batch_size), plan.noise_multiplier**2

    def score(releases: Sequence[Release]) -> float:
        sums = torch.stack([release.update[0] for release in releases]) * plan.expected_batch_size + full
        having = torch.logsumexp((2 * sums - 2) / variance, 0) - math.log(len(sums))
        return float(having - (sums[-1] - 0.5) / variance)

    return score


def _alternating(count: int, width: int) -> Tensor:
    """Gradients (count, 1, 1, width) of length 1 along the diagonal, with alternating signs."""
    gradients = torch.full((count, 1, 1, width), width**-0.5, dtype=torch.float64)
    gradients[1::2] *= -1
    return gradients


def _as_public_masks_move(gradients: Tensor, dropout: float) -> Callable[[PrivacyPlan], Score]:
    """Projects on the change of the clipped sum by the last of these gradients, taken first, if masks are public."""

    def clipped_sum(taken: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(bugs.PUBLIC_SEED)
            rows = F.dropout(taken, dropout).flatten(1)
        return (rows / rows.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)

    return _projection(clipped_sum(gradients.flip(0)) - clipped_sum(gradients[:-1].flip(0)))


_ZEROS = torch.zeros(1, 1, WIDTH, dtype=torch.float64)
_TIED = torch.stack([_along(1000.0)[0, 0], 0.1 * torch.eye(WIDTH, dtype=torch.float64)[1]]).unsqueeze(0)
_IN_FIRST_OF_TWO = torch.stack([_along(1.0)[0], _ZEROS[0]])
_ALTERNATING = _alternating(64, 32)
_APART = torch.tensor([1.0, *[0.0] * (WIDTH - 1), -1.0, *[0.0] * (WIDTH - 1)], dtype=torch.float64)

CASES = (
    Case(
        "no_noise",
        "no noise",
        "full batch; the update along the canary's gradient",
        bugs.no_noise,
        Worst(_copies(4, _ZEROS), _along(), _fixed(), _on_first_axis()),
        plays=4000,
        factor=math.inf,
    ),
    Case(
        "root_k",
        "σ too small by √K (K = 25)",
        "full batch; the canary is at the threshold in all 25 layers",
        bugs.noise_without_root_k,
        Worst(_copies(2, _along(0.0, 25)), _along(1.0, 25), _fixed(25), _on_first_axis(25)),
        factor=5.0,
    ),
    Case(
        "noise_per_rank",
        "each of 25 replicas adds σ/25 of its own",
        "full batch; 25 replicas in one process; the update along the canary's gradient",
        bugs.noise_on_every_rank,
        Worst(_copies(24, _ZEROS), _along(), _fixed(), _on_first_axis(), replicas=25),
        factor=5.0,
    ),
    Case(
        "one_stream",
        "two shards or stages draw the same noise",
        "full batch; the canary is in one of two layers; the difference of the layers' updates",
        bugs.one_stream_for_all,
        Worst(_copies(4, _along(0.0, 2)), _IN_FIRST_OF_TWO, _fixed(2), _projection(_APART)),
    ),
    Case(
        "one_noise",
        "all steps draw the same noise",
        "two Poisson steps at rate 1/2; the difference of the two updates",
        bugs.one_noise_for_all_steps,
        Worst(_copies(1, _ZEROS), _along(), _fixed(), _two_steps_apart, steps=2, rate=0.5),
    ),
    Case(
        "public_masks",
        "masks from the public seed",
        "full batch behind dropout 0.5; the canary comes first and moves the masks of 63 others; how far they moved",
        bugs.masks_from_the_public_seed,
        Worst(_ALTERNATING[:-1], _ALTERNATING[-1], _fixed(), _as_public_masks_move(_ALTERNATING, 0.5), dropout=0.5),
    ),
    Case(
        "no_clipping",
        "no clipping",
        "full batch; the canary's gradient has 1000 times the threshold",
        bugs.no_clipping,
        Worst(_copies(4, _ZEROS), _along(1000.0), _fixed(), _on_first_axis()),
    ),
    Case(
        "one_layer",
        "one of two layers is not clipped",
        "full batch; the canary's gradients have 1000 times the threshold",
        bugs.first_layer_unclipped,
        Worst(_copies(4, _along(0.0, 2)), _along(1000.0, 2), _fixed(2), _on_first_axis(2)),
    ),
    Case(
        "tied_use",
        "one of two uses of a tied weight is missed",
        "full batch; the canary's gradient through the missed use has 1000 times the threshold",
        bugs.tied_use_missed,
        Worst(_copies(4, _along(0.0, 1, 2)), _TIED, _fixed(), _on_first_axis()),
    ),
    Case(
        "tied_separate",
        "25 uses of a tied weight are taken for 25 weights",
        "full batch; the canary's 25 uses have the same gradient at the threshold",
        bugs.tied_uses_as_if_separate,
        Worst(_copies(2, _along(0.0, 1, 25)), _along(1.0, 1, 25), _fixed(), _on_first_axis()),
        factor=5.0,
    ),
    Case(
        "thresholds_first",
        "thresholds move before the noise",
        "full batch; 50 others within the threshold and a quantile of 0 let it fall by e³",
        bugs.thresholds_before_noise,
        Worst(_copies(50, _ZEROS), _along(2.0), _adaptive(0.5, 0.0, 3.0), _on_first_axis()),
    ),
    Case(
        "raw_counts",
        "counts are not centred",
        "the vector of 4 counts alone; r = 0.99; the canary is within all thresholds",
        bugs.counts_not_centred,
        WorstCounts(4, 8, 0.99),
        plays=100_000,
        factor=2.0,
    ),
    Case(
        "last_microbatch",
        "counts of the last microbatch only",
        "full batch; the canary is alone in the last microbatch; how far the threshold rises",
        bugs.counts_of_the_last_microbatch,
        Worst(_copies(32, _ZEROS), _along(2.0), _adaptive(0.9), _risen, microbatch=16),
    ),
    Case(
        "drawn_size",
        "the drawn batch size is the denominator",
        "full batch of 2 or 3; the length of an update with 2000 parameters",
        bugs.drawn_batch_size,
        Worst(_copies(2, _along(0.0, width=2000)), _along(width=2000), _fixed(), _narrow),
    ),
    Case(
        "shuffle",
        "shuffled batches accounted as Poisson",
        "one epoch of 50 batches of 2; all others have the opposite gradient; the likelihood ratio of the sums",
        bugs.shuffled_batches,
        Worst(
            _copies(99, _along(-1.0)), _along(1.0), _fixed(), _shuffle_likelihood, steps=50, rate=0.02, microbatch=16
        ),
        plays=700,
    ),
    Case(
        "empty_skipped",
        "empty batches are skipped",
        "four Poisson steps at rate 1/2 without others; how many steps moved the weights",
        bugs.empty_batches_skipped,
        Worst(_copies(0, _ZEROS), _along(), _fixed(), _steps_with_a_move, steps=4, rate=0.5),
    ),
    Case(
        "mean_loss",
        "the loss is a mean over the batch",
        "full batch; a canary makes the mean of 20 others fall below the threshold; how far the threshold falls",
        bugs.mean_loss,
        Worst(_copies(20, _along(20.5)), _along(0.5), _adaptive(0.9), _fallen),
    ),
)
