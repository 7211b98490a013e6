"""Recurrent layers in plain operations are torch's own: outputs, states and every gradient, to 1e-12 in float64."""

from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from groupwise.clipping.rules import recurrent as recurrent_file
from groupwise.clipping.rules.recurrent import is_rewritten, recurrent
from groupwise.errors import UserError
from tests.clipping.as_torch import assert_same, leaves
from tests.combinations import pairs_fast

B, T, D, H = 4, 5, 3, 6
KINDS = {
    "lstm": lambda **options: nn.LSTM(D, H, **options),
    "lstm_projected": lambda **options: nn.LSTM(D, H, proj_size=2, **options),
    "gru": lambda **options: nn.GRU(D, H, **options),
    "rnn": lambda **options: nn.RNN(D, H, **options),
    "rnn_relu": lambda **options: nn.RNN(D, H, nonlinearity="relu", **options),
}


def expressed(module: nn.Module, *args, **kwargs):
    """The module's forward in plain operations."""
    if isinstance(module, nn.RNNBase):
        return recurrent(module, *args, **kwargs)
    with patch.multiple(torch._VF, **recurrent_file.CELL_FUNCTIONS):
        return module(*args, **kwargs)


def same(module: nn.Module, inputs: list[Tensor], run) -> None:
    """`run(forward)` gives the same results and gradients for the module's own forward and the re-expressed one."""
    assert_same(module, expressed, run, inputs)


def states_of(module: nn.RNNBase, batch: int = B) -> list[Tensor]:
    """Initial states of all layers and directions."""
    count = module.num_layers * (1 + module.bidirectional)
    sizes = [module.proj_size or module.hidden_size] + [module.hidden_size] * isinstance(module, nn.LSTM)
    return [torch.randn(count, batch, size, requires_grad=True) for size in sizes]


def as_hx(module: nn.RNNBase, states: list[Tensor]):
    return tuple(states) if isinstance(module, nn.LSTM) else states[0]


@pytest.mark.parametrize(
    ("kind", "layers", "bidirectional", "bias"), pairs_fast(product(KINDS, (1, 2), (False, True), (True, False)))
)
def test_sequences_of_one_length(double, kind, layers, bidirectional, bias):
    for batch_first, with_states in ((True, False), (False, True)):
        module = KINDS[kind](num_layers=layers, bidirectional=bidirectional, bias=bias, batch_first=batch_first)
        x = torch.randn((B, T, D) if batch_first else (T, B, D), requires_grad=True)
        states = states_of(module) if with_states else []
        hx = as_hx(module, states) if with_states else None
        same(module, [x, *states], lambda forward, x=x, hx=hx: forward(x, hx))


@pytest.mark.parametrize(
    ("kind", "with_states", "lengths"),
    pairs_fast(product(KINDS, [True, False], [(5, 4, 2, 2, 1), (2, 5, 1, 4, 2), (3, 3, 3, 3, 3)])),
)
def test_packed_sequences(double, kind, with_states, lengths):
    module = KINDS[kind](num_layers=2, bidirectional=True)
    x = [torch.randn(length, D, requires_grad=True) for length in lengths]
    states = states_of(module, len(lengths)) if with_states else []
    hx = as_hx(module, states) if with_states else None
    for enforced in (False, True) if lengths == tuple(sorted(lengths, reverse=True)) else (False,):

        def pack(enforced=enforced) -> PackedSequence:
            return pack_sequence(x, enforce_sorted=enforced)

        same(module, [*x, *states], lambda forward, pack=pack: forward(pack(), hx))
        packed = pack()
        out, _ = recurrent(module, packed, hx)
        for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            mine, own = getattr(out, name), getattr(packed, name)
            assert (mine is None and own is None) or torch.equal(mine, own)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_beyond_an_examples_end_count_for_nothing(double, monkeypatch, kind):
    lengths, seen = (2, 5, 1, 4), []
    real = recurrent_file.Late.__init__

    def watched(late, weight, bias, like, more=None):
        seen.append(torch.zeros(*like.shape[:2], len(weight), requires_grad=True))
        real(late, weight, bias, like, seen[-1] if more is None else more + seen[-1])

    monkeypatch.setattr(recurrent_file.Late, "__init__", watched)
    module = KINDS[kind](bidirectional=True)
    packed = pack_sequence([torch.randn(length, D) for length in lengths], enforce_sorted=False)
    out, last = recurrent(module, packed)
    sum(part.square().sum() for part in (out.data, *leaves(last))).backward()
    assert len(seen) == (4 if kind == "lstm_projected" else 2)
    for added in seen:
        ended = torch.arange(max(lengths)) >= torch.tensor(lengths).unsqueeze(1)
        assert bool((added.grad[ended] == 0).all()) and bool((added.grad[~ended] != 0).any(1).all())


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_is_on_the_outputs_of_all_layers_but_the_last_and_only_in_training(double, monkeypatch, packed):
    calls, mask = [], (torch.rand(B, T, 2 * H) > 0.4) / 0.6

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        calls.append((p, training))
        return x * mask if training else x

    module = nn.GRU(D, H, 3, dropout=0.4, bidirectional=True, batch_first=True)
    x, lengths = torch.randn(B, T, D), torch.tensor([5, 5, 3, 1])
    given = pack_padded_sequence(x, lengths, batch_first=True) if packed else x
    with monkeypatch.context() as patch:
        patch.setattr(recurrent_file.F, "dropout", dropout)
        y, last = recurrent(module, given)
        assert calls == [(0.4, True)] * 2
        module.eval()
        still, _ = recurrent(module, given)
    torch.testing.assert_close(leaves(still), leaves(module(given)[0]))
    for layer in range(3):
        single = nn.GRU(D if layer == 0 else 2 * H, H, bidirectional=True, batch_first=True)
        single.load_state_dict(
            {name: module.get_parameter(name.replace("_l0", f"_l{layer}")) for name in single.state_dict()}
        )
        out, state = single(pack_padded_sequence(x, lengths, batch_first=True) if packed else x)
        torch.testing.assert_close(last[2 * layer : 2 * layer + 2], state, rtol=1e-12, atol=1e-12)
        x = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0] if packed else out
        if layer < 2:
            x = x * mask
    torch.testing.assert_close(leaves(y), leaves(out), rtol=1e-12, atol=1e-12)


def test_masks_of_dropout_are_drawn_for_each_example_and_place():
    torch.manual_seed(0)
    module = nn.LSTM(D, 50, 2, dropout=0.5)
    with patch.object(recurrent_file.F, "linear", side_effect=recurrent_file.F.linear) as linear:
        recurrent(module, torch.randn(20, 30, D))
    kept = (linear.call_args_list[1].args[0] != 0).double()
    assert 0.49 < float(kept.mean()) < 0.51
    for axis in (0, 1, 2):
        assert float(kept.mean(axis).std()) > 0.005 and kept.mean(axis).unique().numel() > 5


CELLS = {
    "lstm": lambda bias: nn.LSTMCell(D, H, bias),
    "gru": lambda bias: nn.GRUCell(D, H, bias),
    "rnn": lambda bias: nn.RNNCell(D, H, bias),
    "rnn_relu": lambda bias: nn.RNNCell(D, H, bias, nonlinearity="relu"),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(double, kind, bias):
    module = CELLS[kind](bias)
    x = torch.randn(B, D, requires_grad=True)
    states = [torch.randn(B, H, requires_grad=True) for _ in range(2 if kind == "lstm" else 1)]
    hx = tuple(states) if kind == "lstm" else states[0]
    same(module, [x], lambda forward: forward(x))
    same(module, [x, *states], lambda forward: forward(x, hx))
    same(module, [x, *states], lambda forward: forward(input=x, hx=hx))


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_of_which_only_a_part_is_used(double, kind):
    module, x = KINDS[kind](num_layers=2), torch.randn(T, B, D, requires_grad=True)
    for part in range(3 if "lstm" in kind else 2):
        same(module, [x], lambda forward, part=part: leaves(forward(x))[part])


def test_what_has_no_batch_or_no_step_is_refused():
    for module, shape in ((nn.LSTM(D, H), (T, D)), (nn.GRUCell(D, H), (D,)), (nn.LSTMCell(D, H), (D,))):
        with pytest.raises(UserError, match=rf"{type(module).__name__} got an input of shape .* the batch"):
            recurrent(module, torch.ones(shape))
    with pytest.raises(UserError, match="no step at all"):
        recurrent(nn.GRU(D, H), torch.ones(0, B, D))


@pytest.mark.parametrize(
    ("hx", "message"),
    [
        ((torch.ones(1, B + 1, H), torch.ones(1, B, H)), "hidden"),
        ((torch.ones(1, B, H), torch.ones(2, B, H)), "hidden"),
    ],
)
def test_states_of_another_size_are_the_modules_own_mistake(hx, message):
    module = nn.LSTM(D, H)
    with pytest.raises(RuntimeError, match=message):
        recurrent(module, torch.ones(T, B, D), hx)
    with pytest.raises(RuntimeError, match="input_size"):
        recurrent(module, torch.ones(T, B, D + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_keeps_states_in_float32(kind):
    torch.manual_seed(0)
    module, x = KINDS[kind](num_layers=2), torch.randn(T, B, D)
    expected, _ = module(x)
    expected.square().sum().backward()
    exact = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y, states = recurrent(module, x)
    assert all(part.dtype == torch.float32 for part in [y, *leaves(states)])
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)
    y.square().sum().backward()
    for name, p in module.named_parameters():
        assert float((p.grad - exact[name]).norm()) <= 0.05 * float(exact[name].norm()) + 0.02


def test_it_takes_the_operations_of_the_products_and_no_more():
    """FLOPs of the matrix products, forward and backward: three times those of the forward pass, less x's gradient."""
    from torch.utils.flop_counter import FlopCounterMode

    module, x = nn.LSTM(D, H, batch_first=True), torch.randn(B, T, D)
    with FlopCounterMode(display=False) as counter:
        recurrent(module, x)[0].sum().backward()
    by_input, by_state = 2 * B * T * D * 4 * H, 2 * B * T * H * 4 * H
    first = 2 * B * H * 4 * H  # the initial state needs no gradient
    assert counter.get_total_flops() == 2 * by_input + 3 * by_state - first


def test_only_torchs_own_forward_on_weights_as_they_are_is_re_expressed():
    class Same(nn.LSTM):
        pass

    class Other(nn.LSTM):
        def forward(self, *args):
            return super().forward(*args)

    normed = nn.utils.parametrizations.weight_norm(nn.GRU(D, H), "weight_ih_l0")
    for module in (nn.LSTM(D, H), Same(D, H), Other(D, H), normed):
        assert is_rewritten(module) is not (module is normed or isinstance(module, Other))
