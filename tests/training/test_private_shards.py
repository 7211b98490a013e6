"""`make_private` with FSDP shards on two processes takes the same steps as one process."""

import pytest
import torch
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

import groupwise
from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from groupwise.training.ranks import Ranks
from tests.pipeline.ranks import run_ranks
from tests.private_use import cross_entropy
from tests.tiny_training import Batches
from tests.training.data_parallel import BATCHES, EXAMPLES, Network

CASES = {
    "adaptive_layer": {"clip": "adaptive_layer", "quantile_budget": 0.1},
    "fixed_layer": {"clip": "fixed_layer"},
    "ghost": {"clip": "ghost"},
}


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(EXAMPLES, 5).double(), torch.randint(0, 3, (EXAMPLES,)))


def network(shards: bool, **options) -> Network:
    torch.manual_seed(1)
    model = Network().double()
    if shards:
        options = {"mesh": init_device_mesh("cpu", (torch.distributed.get_world_size(),)), **options}
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    return model


def private_of(case: str, ranks, model, sigma: float = 0.0, batches=BATCHES, optimizer=None, losses=None):
    """A private training with microbatches of 3, given batches and seeded noise."""
    first, *others = model.parameters()
    optimizer = optimizer or torch.optim.Adam([{"params": others}, {"params": [first]}], lr=0.01)
    private = groupwise.make_private(
        model, optimizer, data(), losses or cross_entropy, noise_multiplier=sigma, steps=len(batches), batch_size=8,
        delta=1e-5, threshold=0.5, microbatch=3, accountant="rdp", ranks=ranks, noise_source=NoiseSource.from_seed(7),
        **CASES[case],
    )  # fmt: skip
    private.core.sampler = Batches(batches)
    return private


def snapshot(private) -> tuple[torch.Tensor, list[float], int]:
    """All weights, thresholds and the number of steps."""
    weights = private.state_dict()["model"].values()
    return torch.cat([value.flatten() for value in weights]), private.engine.thresholds.tolist(), private.executed


def outcome(case: str, ranks, shards: bool):
    model = network(shards)
    private = private_of(case, ranks, model)
    list(private.steps())
    found = snapshot(private), private.engine.counts.tolist()
    private.detach()
    return found


def resumed(ranks, shards: bool):
    """Snapshots after all steps in one go, and with an evaluation and a resumption after the second step."""
    ends = []
    for stops in (False, True):
        model = network(shards)
        private = private_of("adaptive_layer", ranks, model, sigma=1.0)
        if stops:
            list(private.steps(2))
            with torch.no_grad():
                model(data().tensors[0])  # leaves the outermost parameters unsharded
            state = private.state_dict()
            assert all(type(value) is torch.Tensor for value in state["model"].values())
            private.detach()
            model = network(shards)
            private = private_of("adaptive_layer", ranks, model, sigma=1.0)
            private.load_state_dict(state)
            private.core.sampler = Batches(BATCHES)
        list(private.steps())
        ends.append(snapshot(private))
        private.detach()
    return ends


class Gated(torch.nn.Module):
    """Mixes examples through a gate that is closed before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = (torch.nn.Linear(5, n).double() for n in (5, 5, 3))
        torch.nn.init.zeros_(self.gate.weight), torch.nn.init.zeros_(self.gate.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(x + self.gate(x).mean(0))


def refusals(ranks) -> dict[str, str]:
    tied = network(False)
    tied.blocks[1].fall.weight = tied.blocks[0].fall.weight
    fully_shard(tied, mesh=init_device_mesh("cpu", (2,)))
    part = Network().double()
    fully_shard(part.blocks[0], mesh=init_device_mesh("cpu", (2,)))
    halves = network(True, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    models = {"flat": network(True), "gated": fully_shard(Gated(), mesh=init_device_mesh("cpu", (2,)))}
    settings = {"flat": {"clip": "flat"}}
    found = {}
    for name, model in {**models, "tied": tied, "part": part, "halves": halves}.items():
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            before = model(data().tensors[0])
        given = {"ranks": ranks, "noise_multiplier": 1.0, "steps": 1, "batch_size": 8, **settings.get(name, {})}
        try:
            groupwise.make_private(model, sgd, data(), cross_entropy, **given)
            found[name] = ""
        except UserError as error:
            found[name] = str(error)
        with torch.no_grad():
            assert torch.equal(model(data().tensors[0]), before), "a refusal changed the model"
    return found


def sums_in_the_losses(ranks) -> bool:
    """Whether the losses see gradients of earlier microbatches."""
    model, seen = network(True), []

    def losses(model, batch):
        seen.extend(parameter.grad is not None for parameter in model.parameters())
        return cross_entropy(model, batch)

    private = private_of("fixed_layer", ranks, model, losses=losses)
    list(private.steps())
    private.detach()
    return any(seen)


def averages(model) -> torch.Tensor:
    """Gradients of ordinary training, on examples that differ between the processes."""
    model.zero_grad()
    model(data().tensors[0][torch.distributed.get_rank() :][:4]).square().sum().backward()
    return torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()])


def given_back(ranks) -> list[torch.Tensor]:
    """Gradients of a model that was never private, after `detach`, and after a `make_private` that failed."""
    never, detached, failed = network(True), network(True), network(True)
    private_of("adaptive_layer", ranks, detached).detach()
    with pytest.raises(UserError, match="batch_size is missing"):
        sgd = torch.optim.SGD(failed.parameters(), lr=1.0)
        groupwise.make_private(failed, sgd, data(), cross_entropy, noise_multiplier=1.0, steps=1, ranks=ranks)
    return [averages(model) for model in (never, detached, failed)]


def _on_two(rank, world):
    ranks = Ranks()
    return {
        "outcomes": {case: outcome(case, ranks, True) for case in CASES},
        "resumed": resumed(ranks, True),
        "refused": refusals(ranks),
        "sums in the losses": sums_in_the_losses(ranks),
        "given back": given_back(ranks),
    }


@pytest.fixture(scope="module")
def two():
    return run_ranks(_on_two, 2)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_match_one(two, case):
    """In some batch one process has a microbatch more, in another one it has no example, and one batch is empty."""
    (weights, thresholds, executed), _ = outcome(case, Ranks(), False)
    for process in two:
        (found, found_thresholds, steps), _ = process["outcomes"][case]
        assert torch.allclose(found, weights, rtol=0, atol=1e-12) and steps == executed == len(BATCHES)
        assert found_thresholds == pytest.approx(thresholds, rel=1e-12)


def test_shards_average_gradients_again_after_detach(two):
    for process in two:
        never, detached, failed = process["given back"]
        assert torch.equal(never, detached) and torch.equal(never, failed)


def test_an_evaluation_and_a_resumption_change_nothing(two):
    for process in two:
        (weights, thresholds, _), (resumed_weights, resumed_thresholds, steps) = process["resumed"]
        assert torch.equal(weights, resumed_weights) and thresholds == resumed_thresholds and steps == len(BATCHES)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flat", "use one group a layer"),
        ("tied", "untie them"),
        ("part", "call fully_shard on the whole model"),
        ("halves", "leave mp_policy out"),
        ("gated", "mixes the examples of a batch"),
    ],
)
def test_shards_that_cannot_be_clipped_are_refused_in_one_sentence(two, name, words):
    for process in two:
        assert words in process["refused"][name] and "\n" not in process["refused"][name]


def test_the_losses_do_not_see_summed_gradients_of_shards(two):
    assert not any(process["sums in the losses"] for process in two)
