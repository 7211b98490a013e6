"""Recurrent layers in plain operations: dropout, precision, and refused inputs.

`test_module_weights.py` tests that they compute the same as torch's own.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

from groupwise.clipping.rules import recurrent as recurrent_module
from groupwise.clipping.rules.recurrent import is_rewritten, recurrent
from groupwise.errors import UserError

B, T, D, H = 4, 5, 3, 6
KINDS = {
    "lstm": lambda **options: nn.LSTM(D, H, **options),
    "lstm_projected": lambda **options: nn.LSTM(D, H, proj_size=2, **options),
    "gru": lambda **options: nn.GRU(D, H, **options),
    "rnn": lambda **options: nn.RNN(D, H, **options),
    "rnn_relu": lambda **options: nn.RNN(D, H, nonlinearity="relu", **options),
}


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_follows_every_layer_except_the_last_in_training_only(double, monkeypatch, packed):
    calls, mask = [], (torch.rand(B, T, 2 * H) > 0.4) / 0.6

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        calls.append((p, training))
        return x * mask if training else x

    module = nn.GRU(D, H, 3, dropout=0.4, bidirectional=True, batch_first=True)
    x, lengths = torch.randn(B, T, D), torch.tensor([5, 5, 3, 1])
    given = pack_padded_sequence(x, lengths, batch_first=True) if packed else x
    with monkeypatch.context() as patch:
        patch.setattr(recurrent_module.F, "dropout", dropout)
        y, last = recurrent(module, given)
        assert calls == [(0.4, True)] * 2
        module.eval()
        without_dropout, _ = recurrent(module, given)
    torch.testing.assert_close(without_dropout.data, module(given)[0].data)
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
    torch.testing.assert_close(y.data, out.data, rtol=1e-12, atol=1e-12)


def test_inputs_without_batch_or_steps_and_of_wrong_sizes_are_refused():
    for module, shape in ((nn.LSTM(D, H), (T, D)), (nn.GRUCell(D, H), (D,)), (nn.LSTMCell(D, H), (D,))):
        with pytest.raises(UserError, match=rf"{type(module).__name__} got an input of shape .* the batch"):
            recurrent(module, torch.ones(shape))
    with pytest.raises(UserError, match="of length 0"):
        recurrent(nn.GRU(D, H), torch.ones(0, B, D))
    for sizes in (((1, B + 1, H), (1, B, H)), ((1, B, H), (2, B, H))):
        with pytest.raises(RuntimeError, match="hidden"):
            recurrent(nn.LSTM(D, H), torch.ones(T, B, D), tuple(map(torch.ones, sizes)))
    with pytest.raises(RuntimeError, match="input_size"):
        recurrent(nn.LSTM(D, H), torch.ones(T, B, D + 1))


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
    assert all(part.dtype == torch.float32 for part in [y, *tree_leaves(states)])
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)
    y.square().sum().backward()
    for name, p in module.named_parameters():
        assert float((p.grad - exact[name]).norm()) <= 0.05 * float(exact[name].norm()) + 0.02


def test_only_torchs_own_forward_without_parametrizations_is_rewritten():
    class Same(nn.LSTM):
        pass

    class Other(nn.LSTM):
        def forward(self, *args):
            return super().forward(*args)

    parametrized = nn.utils.parametrizations.weight_norm(nn.GRU(D, H), "weight_ih_l0")
    for module in (nn.LSTM(D, H), Same(D, H), Other(D, H), parametrized):
        assert is_rewritten(module) is not (module is parametrized or isinstance(module, Other))
