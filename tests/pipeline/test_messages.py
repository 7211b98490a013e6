"""Clipping and noise need no messages: a private step sends exactly the messages of a non-private one."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from groupwise.pipeline.trainer import PipelineTrainer
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.pipeline.tiny import BATCHES, MICROBATCH, Case, make_trainer

CALLS = (
    "send", "recv", "recv_anysource", "allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "scatter",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "gather",
    "reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "alltoall", "alltoall_base",
)  # fmt: skip
PRIVATE = {
    "fixed": Case(sigma=1.0),
    "adaptive": Case(policy="adaptive", sigma=1.0),
    "by layer": Case(grouping="layer", policy="adaptive", sigma=1.0),
}
Messages = Counter[tuple[str, int, int]]
"""(call, how many tensors, bytes) → how often."""


@contextmanager
def counted() -> Iterator[Messages]:
    """Count the messages that this process sends and receives, all of which go through `ProcessGroup`."""
    seen: Messages = Counter()
    before = {name: vars(dist.ProcessGroup)[name] for name in CALLS}

    def call(name, group, *args, **kwargs):
        tensors = [t for part in args if isinstance(part, list) for t in part if hasattr(t, "nbytes")]
        seen[name, len(tensors), sum(t.nbytes for t in tensors)] += 1
        return before[name].__get__(group)(*args, **kwargs)

    for name in CALLS:
        setattr(dist.ProcessGroup, name, lambda group, *args, _name=name, **kw: call(_name, group, *args, **kw))
    try:
        yield seen
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


def steps(case: Case, ranks: Ranks) -> list[Messages]:
    """The messages of each step, without the sum of metrics and flags at its end."""
    trainer: PipelineTrainer = make_trainer(case, ranks)
    found = []
    for step in range(len(BATCHES)):
        with counted() as seen:
            trainer.step(step)
        found.append(seen)
    return found


def on_two_stages(rank: int, world: int) -> dict:
    """Messages by case."""
    ranks = Ranks(2)
    found = {"none": steps(Case(grouping="none"), ranks)}
    found["flat"] = steps(Case(grouping="flat", policy="adaptive", sigma=1.0), ranks)
    for name, case in PRIVATE.items():
        found[name] = steps(case, ranks)
    with counted() as seen:
        ranks.agree(0.0, 1.0, 2.0)
    found["agree"] = seen
    return found


def test_private_steps_send_exactly_what_non_private_ones_do():
    for rank, found in enumerate(run_ranks(on_two_stages, 2)):
        assert list(found["agree"].values()) == [1], "a step ends with one small sum, private or not"
        plain = found["none"]
        for name in PRIVATE:
            assert found[name] == plain, (rank, name)
        for step, batch in enumerate(BATCHES):
            count = -(-len(batch) // MICROBATCH)
            kinds = Counter(call for call, *_ in plain[step].elements())
            asked = 1 if batch else 0  # torch exchanges before a step whether all stages know their shapes
            assert kinds == Counter({"send": count + asked, "recv": count + asked}) - Counter()
            twice = Counter({message: 2 * often for message, often in plain[step].items()})
            norms = Counter({("allreduce", 1, 8 * count * MICROBATCH): asked})
            assert found["flat"][step] == twice + norms, (rank, step)
