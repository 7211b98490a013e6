"""The order in which a pipeline's microbatches go forward and backward: torch's 1F1B or GPipe, and what is refused."""

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from groupwise.errors import UserError
from groupwise.suggestions import did_you_mean

_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}

_TWO_BACKWARDS = (
    "splits the backward pass into one for inputs and one for weights, so every example would be clipped and counted "
    "twice"
)
_TWO_STAGES = "puts several stages on one device, which has one clipping group and one noise stream"
_REFUSED = {
    "zb1p": _TWO_BACKWARDS,
    "zbvzerobubble": _TWO_BACKWARDS,
    "interleavedzerobubble": _TWO_BACKWARDS,
    "dualpipev": _TWO_BACKWARDS,
    "interleaved1f1b": _TWO_STAGES,
    "loopedbfs": _TWO_STAGES,
}


def check_schedule(name: str) -> None:
    """Refuse a schedule that is not known, or under which clipping would go wrong.

    Raises:
        UserError: with the reason.
    """
    if name in _SCHEDULES:
        return
    reason = _REFUSED.get(name.lower().replace("_", "").replace("-", ""))
    if reason is None:
        reason = f"is not known{did_you_mean(name, tuple(_SCHEDULES))}"
    raise UserError(f"pipeline.schedule={name} {reason}: choose 1f1b or gpipe.")


def least_microbatches(name: str, stages: int) -> int:
    """How many microbatches a step must have at least: 1F1B wants one for every stage."""
    return stages if name == "1f1b" else 1


def held_at_once(name: str, stages: int, index: int, microbatches: int) -> int:
    """How many microbatches stage `index` holds at once between their passes: S - s for 1F1B, all for GPipe."""
    return min(microbatches, stages - index) if name == "1f1b" else microbatches


def make_schedule(name: str, stage: PipelineStage, microbatches: int) -> PipelineScheduleSingle:
    """The schedule of one step on this stage; the last stage's output is one loss an example, and they are summed."""
    return _SCHEDULES[name](stage, microbatches, loss_fn=lambda losses, _: losses.sum(), scale_grads=False)
