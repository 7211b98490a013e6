"""The engine around the clipping: refusals that name the layer, the model unchanged after detaching, checkpointing,
autocast, non-finite examples."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.errors import UserError
from tests.clipping.alone import assert_sums, gradients
from tests.clipping.conftest import Checkpointed, Scale
from tests.clipping.modes import DIRECT, FEW, attached
from tests.clipping.traced import clip, clip_batch


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 4))


@pytest.fixture
def batch(double):
    return torch.randn(6, 3, 6, 6), torch.randint(0, 4, (6,))


def losses_of(model, batch, rows=slice(None)):
    return F.cross_entropy(model(batch[0][rows]), batch[1][rows], reduction="none")


def clipped(engine, batch, rows=range(6)):
    return clip(engine, partial(losses_of, engine.model, batch), rows)


@pytest.mark.parametrize("direct", [False, True])
def test_plain_backward_is_refused(batch, direct):
    model = small_net()

    def trained(rows):
        losses = losses_of(model, batch, rows)
        losses.sum().backward()
        return losses

    with attach(model, per_layer(model), 1.0, direct=direct) as engine:
        with pytest.raises(UserError, match=r"compute gradients themselves \(backward"):
            engine.trace(trained, range(6))
        engine.trace(partial(losses_of, model, batch), range(6))
        for rows in (range(6), [0]):
            with pytest.raises(UserError, match=r"compute gradients themselves \(backward"):
                engine.clip(trained, rows)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("change", [True, False])
def test_freezing_or_unfreezing_after_attaching_is_refused(batch, change):
    model = small_net()
    model[0].bias.requires_grad_(change)
    with attach(model, per_layer(model), 1.0) as engine:
        model[0].bias.requires_grad_(not change)
        with pytest.raises(UserError, match=f"'0.bias' was .* {'frozen' if change else 'unfrozen'}"):
            clipped(engine, batch)


class UsesWeightOutsideItsLayer(nn.Module):
    """Uses a layer's weight outside that layer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 5)

    def forward(self, x):
        return self.net(x) @ self.net._parameters["weight"]


@pytest.mark.parametrize("mode", ["flat", "layer", *DIRECT])
def test_a_parameter_used_outside_its_layer_is_refused(double, mode):
    model, x = UsesWeightOutsideItsLayer(), torch.randn(4, 3, 5)
    losses = lambda x: model(x).square().sum((1, 2))  # noqa: E731
    with attached(model, mode) as engine:
        with pytest.raises(UserError, match=r"'net.weight' is used outside"):
            clip_batch(engine, losses, x)
        with engine.forward(4, 0):
            output = model(x)
        with pytest.raises(UserError, match=r"'net.weight' is used outside"):
            engine.check_output(output)
        assert all(p.grad is None for p in model.parameters())
        if mode in DIRECT:
            model.net.weight = nn.Parameter(model.net.weight.detach().clone())  # unknown to the engine
            with pytest.raises(UserError, match=r"of shape \(5, 5\).*used outside"):
                clip_batch(engine, losses, x)
            return
        model.net.bias.requires_grad_(False)
        with pytest.raises(UserError, match=r"'net.bias' was .* frozen"), engine.backward_of(0):
            pass


@pytest.mark.parametrize("mode", ["layer", *DIRECT])
def test_a_layer_that_the_loss_never_reaches_is_refused_by_name(batch, mode):
    model = small_net()
    model.add_module("head", nn.Identity())
    model.head.spare = nn.Linear(3, 3)
    with attached(model, mode) as engine, pytest.raises(UserError, match=r"'head.spare'"):
        clipped(engine, batch)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), [1.0, 2.0]])
def test_invalid_thresholds_are_refused(bad):
    model = small_net()
    with pytest.raises(UserError, match="threshold"):
        attach(model, per_layer(model), bad)


def test_ghost_clipping_of_several_groups_is_refused():
    model = small_net()
    with pytest.raises(UserError, match="one group"):
        attach(model, per_layer(model), 1.0, norms="ghost")


def test_two_engines_can_alternate_but_not_attach_during_a_pass(batch):
    model = small_net()
    with attach(model, per_layer(model), 1.0) as engine, attach(model, flat(model), 0.5) as second:
        sums = []
        for each in (engine, second, engine):
            model.zero_grad()
            clipped(each, batch)
            sums.append(gradients(model))
        assert all(torch.equal(sums[0][name], sums[2][name]) for name in sums[0])
        assert not torch.equal(sums[0]["0.weight"], sums[1]["0.weight"])
        assert (engine.examples, second.examples) == (12, 6)
        with engine.forward(6), pytest.raises(UserError, match="replaced already"):
            attach(model, flat(model), 1.0)


@pytest.mark.filterwarnings("ignore:groupwise has no rule")
def test_the_model_is_unchanged_outside_of_passes(batch):
    model = small_net()
    model[3] = nn.Sequential(nn.Flatten(), Scale(128))
    untouched, before = copy.deepcopy(model), set(model.state_dict())
    attributes = [set(vars(module)) for module in model.modules()]
    losses_of(untouched, batch).sum().backward()

    def is_plain():
        assert [set(vars(module)) for module in model.modules()] == attributes and set(model.state_dict()) == before
        model.zero_grad()
        losses_of(model, batch).sum().backward()
        assert_sums(model, gradients(untouched), 0, 0)
        model.zero_grad()

    with attach(model, per_layer(model), 1.0) as engine:
        is_plain()
        for _ in range(2):
            clipped(engine, batch)
            is_plain()
        with engine.forward(6):
            losses = losses_of(model, batch)
        is_plain()
        engine.backward(losses)
        assert not torch.equal(model[4].weight.grad, untouched[4].weight.grad)
        with pytest.raises(ZeroDivisionError):
            engine.clip(lambda rows: losses_of(model, batch, rows) / (1 // 0), range(6))
        is_plain()
    is_plain()


@pytest.mark.parametrize("mode", ["flat", *DIRECT])
def test_forward_without_backward_does_not_disturb_the_next_step(batch, mode):
    model = small_net()
    with attached(model, mode, 0.5) as engine:
        clipped(engine, batch)
        expected, counts = gradients(model), engine.counts
        model.zero_grad()
        engine.reset()
        for rows in (range(6), range(2)):
            with engine.forward(len(rows)):
                losses_of(model, batch, rows)  # discarded, with gradients enabled
        with torch.no_grad(), engine.forward(6):
            losses_of(model, batch)
        clipped(engine, batch)
        assert_sums(model, expected, rtol=1e-12)
        assert torch.equal(engine.counts, counts)


def test_counts_can_use_other_thresholds_than_clipping(batch):
    model = small_net()
    with attach(model, flat(model), 0.5) as engine:
        clipped(engine, batch)
        expected = gradients(model)
        norms = engine.per_example_norms[0]
        model.zero_grad()
        engine.reset()
        engine.set_thresholds(0.5, count=[float(norms.sort().values[3]) * 1.0001])
        clipped(engine, batch)
        assert engine.counts.tolist() == [4.0]
        assert_sums(model, expected, 0, 0)


def test_a_norm_equal_to_the_threshold_counts_as_below_it():
    model = nn.Linear(1, 1, bias=False)
    with attach(model, flat(model), 3.0) as engine:
        clip_batch(engine, lambda x: model(x).sum(1), torch.tensor([[2.0], [3.0], [3.5]]))
        assert engine.counts.tolist() == [2]


def layers_that_form_gradients() -> list[nn.Module]:
    """Layers with and without a rule, normalisations among them, that form per-example gradients."""
    layers = nn.ConvTranspose2d(3, 4, 3, 2), nn.InstanceNorm2d(4, affine=True), nn.RMSNorm(13)
    return [*layers, nn.ConvTranspose2d(4, 2, 2), nn.Flatten()]


NETS = {
    "small": small_net,
    "gradients formed": lambda: nn.Sequential(*layers_that_form_gradients()),
    "checkpointed": lambda: Checkpointed(*layers_that_form_gradients()),
}


@pytest.mark.filterwarnings("ignore:groupwise has no rule")
@pytest.mark.parametrize(("net", "mode"), [*product(NETS, FEW), *product(["small"], DIRECT)])
@pytest.mark.parametrize("non_finite", ["input", "loss"])
def test_a_non_finite_example_contributes_zero(batch, net, mode, non_finite):
    model = NETS[net]()
    x, y = batch[0].clone(), batch[1]
    with attached(model, mode, 0.5) as engine:
        clipped(engine, (x, y), range(1, 6))
        expected = gradients(model)
        model.zero_grad()
        engine.reset()
        if non_finite == "input":
            x[0, 0, 0, 0] = float("nan")
        with engine.forward(6):
            losses = losses_of(model, (x, y))
        if non_finite == "loss":
            losses = losses * torch.tensor([float("inf"), 1, 1, 1, 1, 1])
        engine.backward(losses)
        assert engine.nonfinite == 1
        assert_sums(model, expected, rtol=1e-12)


@pytest.mark.slow
def test_compiled_model_gives_the_same_sums(batch):
    model = small_net()
    with attach(model, per_layer(model), 0.5) as engine:
        clipped(engine, batch)
        expected = gradients(model)
        model.zero_grad()
        clip(engine, partial(losses_of, torch.compile(model), batch), range(6))
        assert_sums(model, expected, rtol=1e-9)


@pytest.mark.parametrize("direct", [False, True])
def test_losses_of_a_finished_forward_pass_are_refused(batch, direct):
    model = small_net()
    with attach(model, per_layer(model), 0.5, direct=direct) as engine:
        engine.trace(partial(losses_of, model, batch), range(6))
        both = []
        for _ in range(2):
            with engine.forward(6):
                both.append(losses_of(model, batch))
        engine.backward(both[1])
        for again in both:
            with pytest.raises(UserError, match="No forward pass waits"):
                engine.backward(again)
        with engine.forward(6):
            losses_of(model, batch)
        with pytest.raises(UserError, match="forward pass that is over"):
            engine.backward(both[0])
        with engine.forward(2):
            losses_of(model, batch, range(2))
        with pytest.raises(UserError, match="2 examples gave losses"):
            engine.backward(both[0])


@pytest.mark.parametrize("make_partition", [flat, per_layer])
def test_cancellation_in_float32_never_exceeds_the_threshold(make_partition):
    """Nearly equal inputs and output gradients that sum to zero: sums over Gram matrices cancel almost completely."""
    torch.manual_seed(0)
    layer = nn.Linear(512, 512)
    x = torch.randn(1, 1, 512) * 10 + 1e-3 * torch.randn(20, 64, 512)
    g = torch.randn(20, 64, 512)
    g = g - g.mean(1, keepdim=True)
    for i in range(20):
        layer.zero_grad()
        with attach(layer, make_partition(layer), 0.01, formula="gram") as engine:
            clip(engine, lambda rows: (layer(x[rows]) * g[rows]).sum((1, 2)), [i])
        exact = g[i].double().t() @ x[i].double()
        truth = float(exact.square().sum().add(g[i].double().sum(0).square().sum()).sqrt())
        released = float(torch.stack([p.grad.double().square().sum() for p in layer.parameters()]).sum().sqrt())
        assert released <= 0.01 * (1 + 1e-2), (released, truth)


@pytest.mark.parametrize("mode", [*FEW, *DIRECT])
@pytest.mark.parametrize("bfloat16_losses", [True, False])
def test_one_example_under_autocast_stays_within_its_threshold(mode, bfloat16_losses):
    """Ghost clipping runs backward twice: both passes must round alike, or the norm belongs to other gradients."""
    threshold = 0.037
    for seed in range(8):
        torch.manual_seed(seed)
        blocks = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]
        model = nn.Sequential(*blocks, nn.Linear(32, 4))
        with attached(model, mode, threshold) as engine:
            with torch.autocast("cpu", dtype=torch.bfloat16), engine.forward(1):
                outputs = model(torch.randn(1, 8, 32))
            losses = 100 * ((outputs if bfloat16_losses else outputs.float()) - 1).abs().mean((1, 2))
            engine.backward(losses)
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
        for group in engine.groups:
            norm = sum(p.grad.double().square().sum() for p in group.parameters).sqrt()
            assert 0.99 * threshold < norm <= threshold * (1 + 1e-6)
