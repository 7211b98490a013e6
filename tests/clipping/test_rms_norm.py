"""RMSNorm classes are known by what they compute, and by nothing else; nothing is left behind by trying them."""

import copy
import importlib
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.clipping import attach, flat, per_layer
from groupwise.clipping.reference import clipped_sums
from groupwise.clipping.rules import find_rule
from groupwise.clipping.rules import normalization as rms_norm
from groupwise.clipping.rules.normalization import FoundRMSNormRule, LayerNormRule, RMSNormRule, find_form
from groupwise.errors import UserError
from groupwise.torchvision_import import import_torchvision
from tests.clipping.conftest import GemmaNorm, LlamaNorm
from tests.clipping.traced import clip, clip_batch, trace_batch

TRANSFORMERS = [
    ("llama", "LlamaRMSNorm", False, False),
    ("mistral", "MistralRMSNorm", False, False),
    ("qwen2", "Qwen2RMSNorm", False, False),
    ("qwen3", "Qwen3RMSNorm", False, False),
    ("phi3", "Phi3RMSNorm", False, False),
    ("t5", "T5LayerNorm", False, False),
    ("olmo2", "Olmo2RMSNorm", False, True),
    ("gemma", "GemmaRMSNorm", True, True),
    ("gemma3", "Gemma3RMSNorm", True, True),
]


@pytest.mark.parametrize(("family", "name", "plus_one", "keeps_dtype"), TRANSFORMERS)
def test_classes_of_transformers_give_their_own_outputs_and_gradients(family, name, plus_one, keeps_dtype):
    import_torchvision()  # before transformers, which falls without it
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    module = getattr(modeling, name)(6)
    with torch.no_grad():
        module.weight.add_(0.3 * torch.randn(6))
    assert find_rule(module) is FoundRMSNormRule
    form = find_form(module)
    assert (form.plus_one, form.keeps_dtype) == (plus_one, keeps_dtype)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 3, 6, dtype=dtype, requires_grad=True)
        expected = module(x)
        slopes = torch.randn_like(expected)
        exact, exact_inputs = [], torch.autograd.grad((expected * slopes).sum(), x)[0]
        for i in range(4):
            exact.append(torch.autograd.grad((module(x[i : i + 1]) * slopes[i]).sum(), module.weight)[0].norm())
        with attach(module, flat(module), 1e30) as engine:
            trace_batch(engine, lambda x: module(x).sum((1, 2)).float(), x)
            with engine.forward(4):
                y = module(x)
            assert y.dtype == expected.dtype
            close = {"rtol": 2e-6, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
            torch.testing.assert_close(y, expected, **close)
            with engine.forward(4, microbatch=0):
                losses = (module(x) * slopes).sum((1, 2)).float()
            with engine.backward_of(0, 4):  # of inputs that get a gradient, as in a pipeline
                losses.sum().backward()
            torch.testing.assert_close(x.grad, exact_inputs, **close)
            torch.testing.assert_close(engine.per_example_norms[0], torch.stack(exact), check_dtype=False, **close)


class Centred(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.variance_epsilon)


class EpsOutside(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Summed(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.normalize(x, dim=-1)


class OverTheBatch(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean((0, -1), keepdim=True) + self.variance_epsilon)


class Squared(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight


class Clamped(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-2, 2)


class ChannelsFirst(LlamaNorm):
    """As usual for two and three axes; for images the channels are axis 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1) if x.dim() == 4 else super().forward(x)


class Dropping(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class Evaluating(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.training else 2)


class Pair(LlamaNorm):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Gated(LlamaNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class GatedAtWill(LlamaNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


class Buffered(LlamaNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("count", torch.zeros(1))


class WithChild(LlamaNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.inner = nn.Identity()


class WithBias(LlamaNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))


class WithoutEps(LlamaNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.tiny = self.__dict__.pop("variance_epsilon")

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.tiny)


OTHERS = [Centred, EpsOutside, Summed, OverTheBatch, Squared, Clamped, ChannelsFirst, Dropping, Evaluating, Pair]
OTHERS += [Gated, GatedAtWill, Buffered, WithChild, WithBias, WithoutEps]


@pytest.mark.parametrize("kind", OTHERS)
def test_what_computes_something_else_is_not_taken(kind):
    module = kind(6)
    assert find_rule(module) is None
    if "variance_epsilon" in module.__dict__:
        module.variance_epsilon = 1e-6
        assert find_rule(module) is None


@pytest.mark.parametrize("size", [2, 5, 64])
def test_what_computes_it_is_taken_whatever_its_weights_are(size):
    for kind, plus_one in ((LlamaNorm, False), (GemmaNorm, True)):
        for value in (0.0, 1.0, -1.0, 1e3):
            module = kind(size)
            nn.init.constant_(module.weight, value)
            assert find_form(module) == (0.01, plus_one, plus_one), value
    assert find_rule(nn.RMSNorm(size)) is RMSNormRule


def test_a_class_that_a_wrapper_made_of_it_is_taken():
    """Sharding makes a new class of a module's own, in a module of torch."""
    module = LlamaNorm(5)
    module.__class__ = type("FSDPLlamaNorm", (LlamaNorm,), {"__module__": "torch.distributed.fsdp"})
    assert find_rule(module) is FoundRMSNormRule
    assert find_rule(nn.LayerNorm(5, bias=False)) is LayerNormRule


def test_a_weight_that_only_its_own_values_betray_is_not_taken():
    class Special(LlamaNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + float((self.weight == 7).all())

    module = Special(6)
    assert find_rule(module) is FoundRMSNormRule
    nn.init.constant_(module.weight, 7.0)
    assert find_rule(module) is None


def test_trying_a_module_leaves_no_trace():
    class Counting(LlamaNorm):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.calls, self.seen = 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(x)
            torch.rand(1)
            return super().forward(x)

    module = Counting(4).eval()
    called = []
    module.register_forward_hook(lambda *args: called.append(1))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert find_rule(module) is FoundRMSNormRule
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not module.calls and not module.seen and not called and not module.training
    assert module.weight.grad is None


def test_inputs_of_another_size_are_refused():
    for module, shape in ((nn.RMSNorm(5), (5,)), (nn.RMSNorm((3, 5)), (3, 5)), (LlamaNorm(5), (2, 4))):
        with attach(module, flat(module), 1.0) as engine, pytest.raises(UserError, match="the batch must come first"):
            clip_batch(engine, lambda x, run=module: run(x).flatten(1).sum(1), torch.ones(shape))


def test_an_example_that_is_not_finite_is_left_out(double):
    model, x = nn.Sequential(nn.Linear(5, 6), LlamaNorm(6)), torch.randn(4, 3, 5)
    x[2, 1, 0] = float("nan")
    partition = per_layer(model)
    truth = clipped_sums(model, lambda i: model(x[i : i + 1]).square().sum(), [0, 1, 3], partition, [0.5, 0.5])
    with attach(model, partition, 0.5) as engine:
        clip_batch(engine, lambda x: model(x).flatten(1).square().sum(1), x)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth.sums[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", [lambda: nn.RMSNorm(6), lambda: LlamaNorm(6), lambda: GemmaNorm(6)])
def test_checkpointing_changes_nothing(double, norm):
    model, x = nn.Sequential(nn.Linear(5, 6), norm(), nn.Linear(6, 2)), torch.randn(4, 3, 5)
    sums = []
    for checkpointed in (False, True):
        model.zero_grad()
        with attach(model, flat(model), 0.5) as engine:
            run = partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False) if checkpointed else model
            clip_batch(engine, lambda x, run=run: run(x).flatten(1).square().sum(1), x)
        sums.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*sums, rtol=0, atol=0)


def test_it_is_no_fallback_in_a_whole_model():
    import_torchvision()
    transformers = importlib.import_module("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Qwen3Config(vocab_size=30, num_key_value_heads=1, max_position_embeddings=12, **sizes)
    torch.manual_seed(0)
    model, ids = transformers.Qwen3ForCausalLM(config), torch.randint(0, 30, (4, 7))
    positions = torch.arange(7).expand(4, 7)

    def losses(rows: Tensor) -> Tensor:
        logits = model(input_ids=ids[rows], position_ids=positions[rows]).logits[:, :-1]
        return F.cross_entropy(logits.mT, ids[rows, 1:], reduction="none").sum(1)

    partition = per_layer(model)
    thresholds = [0.1] * len(partition)
    truth = clipped_sums(model, lambda i: losses(torch.tensor([i]))[0], range(4), partition, thresholds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback would warn
        engine = attach(model, partition, thresholds)
    with engine:
        clip(engine, lambda rows: losses(torch.tensor(list(rows))), range(4))
    torch.testing.assert_close(engine.per_example_norms, truth.norms, rtol=1e-4, atol=1e-5, check_dtype=False)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth.sums[name], rtol=1e-4, atol=1e-5)


def test_numbers_to_try_with_have_no_pattern():
    numbers = rms_norm._numbers(4, 64)
    assert numbers.unique().numel() > 250 and numbers.abs().max() <= 1
    assert float(numbers.mean(1).abs().max()) < 0.2
