"""Misuse of a private training is refused in one sentence."""

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from groupwise.errors import UserError
from groupwise.privacy import NoiseSource
from groupwise.private.data import READ
from tests.private_use import DATA, Misuse, Use, X, Y, cross_entropy, network, refuses


def in_the_losses(do: Callable[[nn.Module, Tensor, Tensor], object], model: nn.Module | None = None) -> None:
    """Train with correct losses that also call `do` once training has begun."""
    training: list[bool] = []

    def losses(model: nn.Module, batch: Any) -> Tensor:
        values = cross_entropy(model, batch)
        if training:
            do(model, *batch)
        return values

    use = Use(model, losses=losses)
    training.append(True)
    use.train()


def with_losses(losses: Callable[[nn.Module, Tensor, Tensor], object], model: nn.Module | None = None) -> None:
    Use(model, losses=lambda model, batch: losses(model, *batch)).train()


def between_steps(do: Callable[[Use], object]) -> None:
    use = Use()
    for _ in use.private.steps():
        do(use)


def a_step_within_a_step() -> None:
    uses: list[Use] = []

    def losses(model: nn.Module, batch: Any) -> Tensor:
        for use in uses:
            use.private.step()
        return cross_entropy(model, batch)

    uses.append(Use(losses=losses))
    uses[0].train()


def weights_in_the_losses(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        model[0].bias.add_(x.mean())


def buffer_in_the_losses() -> None:
    model = network()
    model.register_buffer("seen", torch.zeros(()))
    in_the_losses(lambda model, x, y: model.seen.add_(x.sum()), model)


def frozen_in_the_losses() -> None:
    model = network(nn.Linear(8, 8).requires_grad_(False))
    in_the_losses(lambda model, x, y: model[2].bias.mul_(x.mean()), model)


def data_in_a_penalty(model: nn.Module, x: Tensor, y: Tensor) -> None:
    next(model.parameters()).sum().mul(x.sum()).backward()


def in_a_fork() -> None:
    use = Use()
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            use.private.step()
        except UserError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.wait()
    os.close(writer)
    raise UserError(os.read(reader, 1000).decode())


def freeze(use: Use) -> None:
    use.model[0].weight.requires_grad_(False)


def momentum_from_before() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cross_entropy(model, (X, Y)).mean().backward()
    optimizer.step()
    Use(model, optimizer=optimizer)


def one_source_twice() -> None:
    source = NoiseSource.fresh()
    for _ in range(2):
        Use(noise_source=source).train(1)


def more_in_the_optimizer(use: Use) -> None:
    use.optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})


def added_and_in_the_optimizer(use: Use) -> None:
    use.model.extra = nn.Linear(2, 2)
    use.optimizer.add_param_group({"params": use.model.extra.parameters()})


def replace(use: Use) -> None:
    use.model[0].weight = nn.Parameter(torch.zeros(8, 5))


def added_later() -> None:
    use = Use(losses=lambda model, batch: cross_entropy(model, batch) * getattr(model[0], "extra", 1.0))
    use.train(1).model[0].extra = nn.Parameter(torch.ones(1))
    use.train()


def grown_dataset() -> None:
    data = [(x, y) for x, y in zip(X, Y, strict=True)]
    use = Use(data=data).train(1)
    data.append(data[0])
    use.train()


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0))


def mixed_items(rows: list[Any]) -> Any:
    """MixUp with the neighbour in the batch."""
    x, y = default_collate(rows)
    return (x + x.roll(1, 0)) / 2, y


class Centred(TensorDataset):
    """Centres the items that it reads together."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        x, y = self[rows]
        return list(zip(x - x.mean(0), y, strict=True))


def hardest(model: nn.Module, batch: Any) -> Tensor:
    """The losses of the 8 hardest examples of a batch, and 0 for the others."""
    losses = model(batch[0]).square().sum(1)
    return losses * (losses >= losses.topk(min(8, len(losses))).values[-1])


class Noised(TensorDataset):
    """Adds new noise to each item, without mixing items."""

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        x, y = self[rows]
        return list(zip(x + torch.randn_like(x), y, strict=True))


class NoisedMixUp(TensorDataset):
    """Mixes the items that it reads together, and adds new noise to each."""

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        x, y = self[rows]
        return list(zip((x + x.flip(0)) / 2 + 0.1 * torch.randn_like(x), y, strict=True))


class Reused(TensorDataset):
    """Reads every item into the same memory."""

    def __getitem__(self, row: Any) -> tuple[Tensor, Tensor]:
        self.read = getattr(self, "read", X[0].clone()).copy_(X[row])
        return self.read, Y[row]


class Fitted(nn.Module):
    """Subtracts the mean of the first batch that it sees."""

    def __init__(self, trains: bool | None) -> None:
        super().__init__()
        self.fitted = False
        mean = torch.zeros(8)
        if trains is None:
            self.register_buffer("mean", mean)
        else:
            self.mean = nn.Parameter(mean, requires_grad=trains)

    def forward(self, x: Tensor) -> Tensor:
        if not self.fitted:
            self.mean.data.copy_(x.detach().mean(0))
            self.fitted = True
        return x - self.mean


def all_pairs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(B, 1) − (B,) is (B, B)."""
    return (model(x)[:, :1] - y).square().mean(1)


OTHER = network()
BINARY = nn.BCEWithLogitsLoss(reduction="none")


def divided_by_rare_labels() -> None:
    """Two labels of the examples that are read before training differ from all others."""
    x, y = torch.randn(1000, 5), torch.zeros(1000, dtype=torch.long)
    y[torch.linspace(0, 999, READ).round().long()[[30, 70]]] = 1
    data = TensorDataset(x, y)
    Use(data=data, losses=lambda model, batch: cross_entropy(model, batch) / batch[1].sum().clamp(min=1))


def ranked_within_queries() -> None:
    """The examples are sorted by query, so that no two of those that are spread over the data have the same."""
    data = TensorDataset(torch.randn(1800, 5), torch.arange(600).repeat_interleave(3), torch.rand(1800))

    def losses(model: nn.Module, batch: Any) -> Tensor:
        x, query, relevance = batch
        scores = model(x)[:, 0]
        pairs = (query[:, None] == query) & (relevance[:, None] > relevance)
        return (scores - relevance).square() + ((1 - scores[:, None] + scores).relu() * pairs).sum(1)

    Use(data=data, losses=losses)


def joined_graphs() -> None:
    """Nodes are given to graphs ten by ten, which is wrong between the smallest and the largest graph."""
    graphs = [SimpleNamespace(nodes=torch.randn(9 if i == 30 else 11 if i == 50 else 10, 5)) for i in range(90)]

    def losses(model: nn.Module, batch: list[Any]) -> Tensor:
        nodes, owners = torch.cat([graph.nodes for graph in batch]), torch.arange(len(batch))
        sizes = torch.tensor([len(graph.nodes) for graph in batch])
        return (
            model(nodes)[:, 0].new_zeros(len(batch)).index_add(0, owners.repeat_interleave(sizes), model(nodes)[:, 0])
        )

    Use(data=graphs, losses=losses, collate_fn=list)


def scaled(use: Use) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(use.optimizer)


REFUSED: dict[str, Misuse] = {
    "a dataset that grows during training": (grown_dataset, "have 41 now"),
    "a model that mixes examples": (
        lambda: Use(Mixing()),
        "mixes the examples of a batch .first seen in the input of layer .inner",
    ),
    "a `collate_fn` that mixes examples (mixup)": (
        lambda: Use(collate_fn=mixed_items),
        "mixes the examples of a batch",
    ),
    "a dataset that mixes the items it reads together": (
        lambda: Use(data=Centred(X, Y)),
        "Example 0 of the data differs between batches",
    ),
    "a dataset that mixes the items it reads together, with random numbers": (
        lambda: Use(data=NoisedMixUp(X, Y)),
        "Example 0 of the data differs between batches",
    ),
    "a dataset that returns the same tensor each time": (
        lambda: Use(data=Reused(X, Y)),
        "Example 0 of the data differs between batches",
    ),
    "a buffer that the first forward pass fits to its batch": (
        lambda: Use(network(Fitted(trains=None)), microbatch=None),
        "first forward pass changed '2.mean', a buffer or parameter",
    ),
    "a parameter that the first forward pass fits to its batch": (
        lambda: Use(network(Fitted(trains=True)), microbatch=None),
        "first forward pass changed '2.mean', a buffer or parameter",
    ),
    "frozen weights that the first forward pass fits to its batch": (
        lambda: Use(network(Fitted(trains=False))),
        "first forward pass changed '2.mean', a buffer or parameter",
    ),
    "losses of all pairs: (B, 1) minus (B,)": (
        lambda: with_losses(all_pairs),
        "in one batch and .* mixes the examples",
    ),
    "losses of the 8 hardest of a batch": (
        lambda: Use(losses=hardest, microbatch=None),
        "alone but .* in a batch: .* mixes the examples of a batch",
    ),
    "losses divided by the number of rare labels": (divided_by_rare_labels, "mixes the examples of a batch"),
    "a ranking loss within queries": (ranked_within_queries, "mixes the examples of a batch"),
    "graphs of several sizes, joined": (joined_graphs, "the rows depend on the data"),
    "a subset that has an example twice": (lambda: Use(data=Subset(DATA, [0, *range(40)])), "the same example several"),
    "a dataset joined with itself": (lambda: Use(data=ConcatDataset([DATA, DATA])), "the same example several times"),
    "torch seeded in the losses": (
        lambda: in_the_losses(lambda *_: torch.manual_seed(0)),
        "was seeded .* not from the secret key",
    ),
    "a step in a forked process": (in_a_fork, "a fork would add the same noise"),
    "a parameter group added to the optimizer later": (lambda: between_steps(more_in_the_optimizer), "not the model's"),
    "a module added to model and optimizer later": (
        lambda: between_steps(added_and_in_the_optimizer),
        "Modules were added or removed",
    ),
    "a mean loss": (
        lambda: Use(losses=lambda model, batch: cross_entropy(model, batch).mean(), microbatch=None),
        "one value per example",
    ),
    "losses of a wrong number of examples": (
        lambda: with_losses(lambda model, x, y: cross_entropy(model, (X[:9], Y[:9]))),
        r"examples gave losses of shape \(9,\)",
    ),
    "losses that fail for one example": (
        lambda: with_losses(lambda model, x, y: BINARY(model(x)[:, 0].squeeze(), y.clamp(max=1.0))),
        "fail for a batch of one example",
    ),
    "losses that are a list": (lambda: with_losses(lambda model, x, y: model(x).tolist()), "The losses are a list"),
    "a parameter in `torch.vmap`": (
        lambda: with_losses(lambda model, x, y: torch.vmap(lambda row: (model[0].weight @ row).sum())(x)),
        "'0.weight' runs inside torch.vmap or another transform",
    ),
    "losses without a gradient": (
        lambda: with_losses(lambda model, x, y: cross_entropy(model, (x, y)).detach()),
        "no gradient",
    ),
    "a step in `torch.no_grad`": (lambda: torch.no_grad()(Use().train)(), "carry no gradient"),
    "another model's losses": (lambda: with_losses(lambda _, x, y: cross_entropy(OTHER, (x, y))), "not the model's"),
    "`backward()` in the losses": (
        lambda: in_the_losses(lambda model, x, y: cross_entropy(model, (x, y)).sum().backward()),
        "let the private step run the backward",
    ),
    "a penalty's own `backward()`": (lambda: in_the_losses(data_in_a_penalty), "set gradients"),
    "an optimizer with the momentum of plain training": (momentum_from_before, ".SGD. has state from earlier steps"),
    "one `noise_source` for two trainings": (one_source_twice, "noise_source was used by another training"),
    "weights that the losses change": (lambda: in_the_losses(weights_in_the_losses), "'0.bias', a buffer or parameter"),
    "a buffer that the losses change": (buffer_in_the_losses, "losses changed 'seen', a buffer or parameter"),
    "frozen weights that the losses change": (frozen_in_the_losses, "losses changed '2.bias', a buffer or parameter"),
    "`private.step()` in the losses": (a_step_within_a_step, "began inside another one"),
    "`register_hook` on a parameter": (
        lambda: between_steps(lambda use: use.model[0].weight.register_hook(lambda g: g * 10)),
        "'0.weight' has a hook",
    ),
    "`register_post_accumulate_grad_hook`": (
        lambda: between_steps(lambda use: use.model[0].weight.register_post_accumulate_grad_hook(lambda p: None)),
        "'0.weight' has a hook",
    ),
    "`GradScaler.step`": (lambda: between_steps(scaled), r"private.step\(\) calls optimizer.step"),
    "`optimizer.step()` between steps": (
        lambda: between_steps(lambda use: use.optimizer.step()),
        r"private.step\(\) calls optimizer.step",
    ),
    "more steps than were planned": (lambda: Use().train().private.step(), "All 3 steps"),
    "a parameter frozen or unfrozen later": (lambda: between_steps(freeze), "frozen"),
    "a parameter added later": (added_later, "0.extra. was added, removed, replaced, .* after clipping began"),
    "a parameter replaced later": (lambda: between_steps(replace), "0.weight. was added, removed, replaced"),
    "a step after `detach`": (lambda: between_steps(lambda use: use.private.detach()), "detached"),
}


@pytest.mark.parametrize("misuse", REFUSED, ids=lambda name: name.replace("`", ""))
def test_misuse_is_refused_in_one_sentence(misuse):
    refuses(*REFUSED[misuse])


def test_the_losses_do_not_see_summed_gradients():
    seen = []

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.extend(parameter.grad for parameter in model.parameters())
        model.zero_grad()
        return cross_entropy(model, batch)

    changed, plain = Use(losses=losses), Use()
    plain.train()
    seen.clear()  # from the check before training
    changed.train()
    assert seen and all(gradient is None for gradient in seen)
    assert all(map(torch.equal, changed.model.parameters(), plain.model.parameters()))


def test_another_private_training_may_continue_with_the_optimizers_state():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = Use(model, optimizer=optimizer).train()
    first.private.detach()
    with pytest.warns(UserWarning, match="trained privately before, and epsilon counts this training alone"):
        second = Use(model, optimizer=optimizer).train(1)
    resumed = Use()
    resumed.private.load_state_dict(second.private.state_dict())
    second.private.detach()
    with pytest.warns(UserWarning, match="trained privately before"):
        head = Use(nn.Sequential(first.model[0].requires_grad_(False), nn.Tanh(), nn.Linear(8, 2))).train(1)
    for later in (second, resumed, head):
        assert "Not included: an earlier private training" in later.private.statement()
    assert "Not included" not in first.private.statement()


def test_an_optimizer_may_begin_with_accumulators():
    model = network()
    Use(model, optimizer=torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)).train(1)


def test_a_resumed_training_keeps_its_noise_source():
    source = NoiseSource.fresh()
    first = Use(noise_source=source).train(1)
    state = copy.deepcopy(first.private.state_dict())
    expected = first.train().weights
    for given in (source, NoiseSource.fresh()):
        again = Use(noise_source=given)
        again.private.load_state_dict(copy.deepcopy(state))
        assert torch.equal(again.train().weights, expected)


def test_a_dataset_may_augment_items_that_it_reads_together():
    Use(data=Noised(X, Y)).train(1)


def test_a_trainable_tensor_that_is_no_parameter_gets_no_gradient():
    prompt = torch.zeros(5, requires_grad=True)
    Use(losses=lambda model, batch: cross_entropy(model, (batch[0] + prompt, batch[1]))).train()
    assert prompt.grad is None
