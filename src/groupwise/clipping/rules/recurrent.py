"""Says recurrent layers and cells in plain operations: `nn.LSTM`, `nn.GRU`, `nn.RNN`, and one step of each.

The products with the inputs of all steps are one linear map, those with the states one "late" map whose gradient is
found for the whole sequence at once (`recurrence.py`); a cell's step is two linear layers. Sequences are batch-first
inside. Packed sequences are padded; a step beyond an example's end leaves its state as it is, so that nothing flows
through it, forth or back.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from groupwise.clipping.rules.recurrence import State, run_sequence, sigmoid_backward, tanh_backward
from groupwise.clipping.rules.weights import Forward, Weights, refuse_unbatched
from groupwise.errors import UserError

Cell = Callable[[Tensor, Tensor, State], State]
"""(W_ih x + b_ih, W_hh h + b_hh, the old state) -> the new state."""


def recurrent(
    weights: Weights, module: nn.RNNBase, input: Tensor | PackedSequence, hx: Any = None
) -> tuple[Tensor | PackedSequence, Any]:
    """What `nn.LSTM`, `nn.GRU` and `nn.RNN` compute.

    Args:
        weights: the uses of the module's parameters.
        module: the layer.
        input: (B, T, d), (T, B, d) without `batch_first`, or a packed sequence of B sequences.
        hx: initial states (layers · directions, B, H), of an LSTM a pair of them; zeros by default.

    Returns:
        What the module returns: outputs like the input, and the last states like `hx`.

    Raises:
        UserError: an input without a batch, or without a step.
    """
    packed = input if isinstance(input, PackedSequence) else None
    if isinstance(input, PackedSequence):
        x, lengths = pad_packed_sequence(input, batch_first=True)
        ends: list[int] | None = lengths.tolist()
    else:
        refuse_unbatched(module, input, 3)
        x, ends = input if module.batch_first else input.transpose(0, 1), None
    if x.shape[1] == 0:
        raise UserError(f"{type(module).__name__} got sequences of no step at all: leave them out, or pad them.")
    given = _initial(module, x, hx)
    checked = (input.data, input.batch_sizes) if isinstance(input, PackedSequence) else (input, None)
    module.check_forward_args(checked[0], hx_like(module, given), checked[1])
    alive = _alive(ends, x)
    directions = ("", "_reverse") if module.bidirectional else ("",)
    last: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in directions:
            state = tuple(part[len(last)] for part in given)
            y, state = _run(weights, module, f"_l{layer}{direction}", x, state, alive)
            outputs.append(y)
            last.append(state)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        if layer < module.num_layers - 1 and module.dropout > 0:
            x = F.dropout(x, module.dropout, module.training)
    states = hx_like(module, tuple(torch.stack(parts) for parts in zip(*last, strict=True)))
    if packed is not None:
        return _pack_as(x, packed), states
    return x if module.batch_first else x.transpose(0, 1), states


def lstm_cell(
    weights: Weights, module: nn.LSTMCell, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """What `nn.LSTMCell` computes: (B, d) and (h, c), each (B, H), to the next (h, c)."""
    h, c = _cell(weights, module, input, hx, 2)
    return h, c


def one_state_cell(
    weights: Weights, module: nn.GRUCell | nn.RNNCell, input: Tensor, hx: Tensor | None = None
) -> Tensor:
    """What `nn.GRUCell` and `nn.RNNCell` compute: (B, d) and h (B, H) to the next h."""
    return _cell(weights, module, input, None if hx is None else (hx,), 1)[0]


RECURRENT: dict[type[nn.Module], Forward] = {
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.RNN: recurrent,
    nn.LSTMCell: lstm_cell,
    nn.GRUCell: one_state_cell,
    nn.RNNCell: one_state_cell,
}


def _run(
    weights: Weights, module: nn.RNNBase, suffix: str, x: Tensor, state: State, alive: Tensor | None
) -> tuple[Tensor, State]:
    """One layer in one direction: x (B, T, d) -> outputs (B, T, h) and the last state."""
    bias_ih, bias_hh = (f"bias_ih{suffix}", f"bias_hh{suffix}") if module.bias else (None, None)
    by_input = weights.linear(x, f"weight_ih{suffix}", bias_ih)
    late = weights.late_linear(f"weight_hh{suffix}", bias_hh, x.shape[1], x)
    project = weights.late_linear(f"weight_hr{suffix}", None, x.shape[1], x) if module.proj_size else None
    return run_sequence(module.mode, by_input, late, state, project, alive, suffix.endswith("_reverse"))


def _cell(weights: Weights, module: nn.RNNCellBase, x: Tensor, state: State | None, parts: int) -> State:
    """One step of a cell."""
    refuse_unbatched(module, x, 2)
    if state is None:
        state = (x.new_zeros(len(x), module.hidden_size),) * parts
    bias_ih, bias_hh = ("bias_ih", "bias_hh") if module.bias else (None, None)
    refuse_unbatched(module, state[0], 2)
    by_input = weights.linear(x, "weight_ih", bias_ih)
    return _cell_of(module)(by_input, weights.linear(state[0], "weight_hh", bias_hh), state)


def _cell_of(module: nn.Module) -> Cell:
    """The pointwise part of a cell's step."""
    if isinstance(module, nn.LSTMCell):
        return lambda x, h, state: _LSTMStep.apply(x, h, state[1])
    if isinstance(module, nn.GRUCell):
        return lambda x, h, state: (_GRUStep.apply(x, h, state[0]),)
    squash = torch.tanh if module.nonlinearity == "tanh" else torch.relu
    return lambda x, h, state: (squash(x.to(state[0].dtype) + h.to(state[0].dtype)),)


class _LSTMStep(torch.autograd.Function):
    """c' = σ(f)∘c + σ(i)∘tanh(g), h' = σ(o)∘tanh(c'): one node where autograd would make ten.

    Args:
        x, h: the two summands (B, 4H) of (i, f, g, o).
        c: (B, H).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        gates = x.to(c.dtype) + h.to(c.dtype)
        i, f, g, o = gates.chunk(4, 1)
        squashed = g.tanh()
        gates.sigmoid_()
        g.copy_(squashed)
        new = torch.addcmul(f * c, i, g)
        t = new.tanh()
        ctx.save_for_backward(gates, c, t)
        return o * t, new

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_h: Tensor, to_c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates, c, t = ctx.saved_tensors
        i, f, g, o = gates.chunk(4, 1)
        to_c = to_c + tanh_backward(to_h * o, t)
        along = torch.cat([to_c * g, to_c * c, to_c * i, to_h * t], 1)
        before = sigmoid_backward(along, gates)
        size = c.shape[1]
        before[:, 2 * size : 3 * size] = tanh_backward(along[:, 2 * size : 3 * size], g)
        return before, before, to_c * f


class _GRUStep(torch.autograd.Function):
    """n = tanh(x_n + σ(r)∘h_n), h' = n + σ(z)∘(h - n).

    Args:
        x, h: the maps (B, 3H) of input and state, each (r, z, n).
        old: the state h, (B, H).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, old: Tensor) -> Tensor:
        size = old.shape[1]
        x, h = x.to(old.dtype), h.to(old.dtype)
        gates = (x[:, : 2 * size] + h[:, : 2 * size]).sigmoid_()
        r, z = gates.chunk(2, 1)
        n = torch.addcmul(x[:, 2 * size :], r, h[:, 2 * size :]).tanh_()
        ctx.save_for_backward(gates, n, h, old)
        return torch.lerp(n, old, z)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates, n, h, old = ctx.saved_tensors
        r, z = gates.chunk(2, 1)
        through = to_h * z
        to_n = tanh_backward(to_h - through, n)
        along = torch.cat([to_n * h[:, 2 * old.shape[1] :], to_h * (old - n)], 1)
        both = sigmoid_backward(along, gates)
        return torch.cat([both, to_n], 1), torch.cat([both, to_n * r], 1), through


def _initial(module: nn.RNNBase, x: Tensor, hx: Any) -> State:
    """Initial states of all layers and directions, each (layers · directions, B, H)."""
    if hx is not None:
        return tuple(hx) if module.mode == "LSTM" else (hx,)
    count = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [module.proj_size or module.hidden_size] + [module.hidden_size] * (module.mode == "LSTM")
    return tuple(x.new_zeros(count, len(x), size) for size in sizes)


def hx_like(module: nn.RNNBase, states: State) -> Any:
    """States as the module takes and gives them: a pair for an LSTM, else one tensor."""
    return states if module.mode == "LSTM" else states[0]


def _alive(ends: list[int] | None, x: Tensor) -> Tensor | None:
    """Which examples have which steps, (B, T, 1); None where all have all."""
    steps = x.shape[1]
    if ends is None or min(ends) == steps:
        return None
    return torch.arange(steps, device=x.device).view(1, -1, 1) < torch.tensor(ends, device=x.device).view(-1, 1, 1)


def _pack_as(x: Tensor, packed: PackedSequence) -> PackedSequence:
    """x (B, T, h) in the examples' own order, packed as they were."""
    rows = x if packed.sorted_indices is None else x.index_select(0, packed.sorted_indices)
    lengths = (packed.batch_sizes.unsqueeze(1) > torch.arange(len(x))).sum(0)
    data = pack_padded_sequence(rows, lengths, batch_first=True).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
