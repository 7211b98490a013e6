"""Lists the small pipelines that `benchmarks.pipeline` and its processes measure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A GPT-2 with random weights in a pipeline.

    Args:
        stages: S.
        width, blocks, vocabulary: of the model.
        microbatch, length, microbatches: b, T, J.
        rank: of the adapters; 0 trains everything.
        schedule, rematerialize: of the pipeline.
    """

    stages: int
    width: int
    blocks: int
    microbatch: int
    length: int
    microbatches: int
    rank: int = 8
    vocabulary: int = 1000
    schedule: str = "1f1b"
    rematerialize: bool = False


SHAPES = {
    "weights_2": Shape(2, width=512, blocks=8, microbatch=2, length=32, microbatches=8),
    "activations_2": Shape(2, width=256, blocks=4, microbatch=4, length=128, microbatches=4, schedule="gpipe"),
    "rematerialized_4": Shape(4, width=256, blocks=8, microbatch=8, length=128, microbatches=8, rematerialize=True),
    "full_4": Shape(4, width=384, blocks=4, microbatch=4, length=64, microbatches=8, rank=0, vocabulary=4000),
}
