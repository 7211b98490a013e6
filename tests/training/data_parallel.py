"""A small float64 network of blocks, and its trainer on any number of processes, built as `run.py` builds it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from groupwise.build import build_trainer
from groupwise.config.schema import ClipConfig, NoiseConfig, OptimConfig, ParallelConfig, RunConfig
from groupwise.training.from_config import make_engine
from groupwise.training.ranks import Ranks
from groupwise.training.step import Trainer
from tests.checked import checked_once
from tests.tiny_training import Batches, Points, plan_of

EXAMPLES, WIDTH = 40, 8
BATCHES = (list(range(13)), [5], [], list(range(20, 28)))
"""Two replicas have 7 and 6, 1 and 0, 0 and 0, 4 and 4 examples of them, in microbatches of 3."""


class Block(nn.Module):
    """x + W2 tanh(W1 norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rise, self.fall = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fall(torch.tanh(self.rise(self.norm(x))))


class Network(nn.Module):
    """Two blocks between two linear layers; the head has fewer classes than there are processes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(5, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PointsTask(Points):
    """The same points for every seed of the network."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = Network()
        torch.manual_seed(0)
        super().__init__(model, EXAMPLES)

    @torch.no_grad()
    def evaluate(self, split, batch_size, limit=None, final=False):
        return {"loss": float(self.losses_of(range(EXAMPLES)).mean())}


def build(
    clip: ClipConfig,
    ranks: Ranks,
    kind: str = "ddp",
    sigma: float = 0.0,
    optim: OptimConfig | None = None,
    batches: Sequence[Sequence[int]] = BATCHES,
    allocation: str = "global",
    task: PointsTask | None = None,
) -> Trainer:
    """The trainer of this process, with microbatches of 3."""
    task = task or PointsTask(seed=ranks.replica)  # all get the weights of the first replica
    config = RunConfig(
        clip=clip,
        noise=NoiseConfig(allocation),
        optim=optim or OptimConfig(learning_rate=0.5),
        parallel=ParallelConfig(ranks.replicas, kind),
    )
    config.train.microbatch, config.debug.noise_seed = 3, 7
    engine = make_engine(task.model, clip)
    plan = plan_of(engine, clip, EXAMPLES, 8, len(batches), sigma)
    with checked_once((clip.name, type(task)) if ranks.replicas == 1 else "one of several processes"):
        trainer = build_trainer(config, task, engine, plan, torch.device("cpu"), ranks, None)
    trainer.private.sampler = Batches(batches)
    return trainer


def steps(trainer: Trainer, start: int = 0) -> list[dict[str, float]]:
    """Run the steps from `start` on as a session does; return their reports."""
    reports = []
    for step in range(start, trainer.private.plan.steps):
        reports.append(trainer.report(trainer.private.ranks.agree(*trainer.step(step))))
        trainer.evaluate("valid", 8)
    return reports


def parameters(trainer: Trainer) -> Tensor:
    """All parameters in one vector, gathered from their shards."""
    return torch.cat([value.flatten() for value in trainer.state_dict()["model"].values()])
