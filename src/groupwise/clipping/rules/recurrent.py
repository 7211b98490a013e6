"""Computes `nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells by plain operations, so that their weights can be clipped.

The products with the inputs of all steps are one linear map. So are the products with the states, for the gradient: to
each of them zeros are added, which receive its gradient, and the states are stored once they are known
(`StepwiseLinear`). Inside, sequences are batch-first. Packed sequences are padded, and steps beyond an example's end do
not change its state, so they have no effect on outputs or gradients.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_map

from groupwise.clipping.per_example import PerExample, in_place_of, refuse_unbatched
from groupwise.errors import UserError

State = tuple[Tensor, ...]
"""(h,) with h (B, H); for an LSTM (h, c), h (B, H or proj_size) and c (B, H)."""


def is_rewritten(module: nn.Module) -> bool:
    """Whether `recurrent` replaces the module's forward: it must be torch's own, without parametrizations."""
    return type(module).forward in (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward) and not is_parametrized(module)


def recurrent(module: nn.RNNBase, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
    """What `nn.LSTM`, `nn.GRU` and `nn.RNN` compute.

    Args:
        module: the layer.
        input: (B, T, d), (T, B, d) without `batch_first`, or a packed sequence of B sequences.
        hx: initial states (layers · directions, B, H), a pair of them for an LSTM; zeros by default.

    Returns:
        As the module does: outputs in the form of the input, and the last states in the form of `hx`.

    Raises:
        UserError: an input without a batch axis or without steps, or one that all examples share.
    """
    if isinstance(input, PerExample):
        return _of_all_examples(module, input, hx)
    sizes: Tensor | None = None
    if isinstance(input, PackedSequence):
        x, lengths = pad_packed_sequence(input, batch_first=True)
        data, sizes = input.data, input.batch_sizes
    else:
        refuse_unbatched(type(module).__name__, input, 3)
        x, lengths = input if module.batch_first else input.transpose(0, 1), None
        data = input
    given, last = _initial(module, x, hx), list[State]()
    module.check_forward_args(data, _hx(module, given), sizes)
    if x.shape[1] == 0:
        raise UserError(f"{type(module).__name__} got sequences of length 0: leave them out, or pad them.")
    alive = None
    if lengths is not None and int(lengths.min()) < x.shape[1]:
        alive = (torch.arange(x.shape[1], device="cpu") < lengths.unsqueeze(1)).to(x.device).unsqueeze(2)
    for layer in range(module.num_layers):
        outputs = []
        for direction in ("", "_reverse") if module.bidirectional else ("",):
            state = tuple(part[len(last)] for part in given)
            y, state = _run(module, f"_l{layer}{direction}", x, state, alive)
            outputs.append(y)
            last.append(state)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        if layer < module.num_layers - 1 and module.dropout > 0:
            x = F.dropout(x, module.dropout, module.training)
    states = _hx(module, tuple(torch.stack(parts) for parts in zip(*last, strict=True)))
    if isinstance(input, PackedSequence):
        return _pack_as(x, input), states
    return x if module.batch_first else x.transpose(0, 1), states


def _of_all_examples(module: nn.RNNBase, input: PerExample, hx: Any) -> tuple[Any, Any]:
    """Run one copy per example of a sequence that all examples share, such as learned tokens."""
    axis = 0 if module.batch_first else 1
    _refuse_shared(module, input, input.dim() != 3 or input.shape[axis] != 1 or hx is not None)
    rows = input.rows.squeeze(axis + 1)
    y, states = recurrent(module, rows if module.batch_first else rows.transpose(0, 1))

    def as_one(t: Tensor, axis: int) -> PerExample:
        return PerExample.of_rows(t.movedim(axis, 0).unsqueeze(axis + 1), input.origin)

    return as_one(y, axis), tree_map(lambda t: as_one(t, 1), states)


def _refuse_shared(module: nn.RNNBase, x: Tensor, refused: bool) -> None:
    if refused:
        raise UserError(
            f"{type(module).__name__} got a sequence of shape {tuple(x.shape)} that is the same for all examples: "
            "expand it to the batch."
        )


def _run(module: nn.RNNBase, suffix: str, x: Tensor, state: State, alive: Tensor | None) -> tuple[Tensor, State]:
    """One layer in one direction: x (B, T, d) -> outputs (B, T, h) and the last state."""

    def parameters(kind: str) -> tuple[Tensor, Tensor | None]:
        return getattr(module, f"weight_{kind}{suffix}"), getattr(module, f"bias_{kind}{suffix}", None)

    by_input = F.linear(x, *parameters("ih"))
    if isinstance(by_input, PerExample):
        _refuse_shared(module, x, not by_input.origin.traces)
        by_input = by_input.like
    by_input, step, first = by_input.to(state[0].dtype), STEPS[module.mode], state[0]
    apart = module.mode == "GRU"  # a GRU does not simply add the two maps
    hidden = StepwiseLinear(*parameters("hh"), by_input, None if apart else by_input)
    project = StepwiseLinear(*parameters("hr"), by_input) if module.proj_size else None
    order = range(x.shape[1])[:: -1 if suffix.endswith("_reverse") else 1]
    inputs, live = by_input.unbind(1) if apart else (), None if alive is None else alive.unbind(1)
    outputs, states = list[Tensor](), list[Tensor]()
    for t in order:
        product = hidden.product(state[0], t)
        new = step((inputs[t], product) if apart else (product,), state)
        if project is not None:
            outputs.append(new[0])
            new = (project.product(new[0], t), new[1])
        state = new if live is None else tuple(torch.where(live[t], n, old) for n, old in zip(new, state, strict=True))
        states.append(state[0])
    hidden.note(torch.stack([first, *states[:-1]][:: order.step], 1))
    if project is not None:
        project.note(torch.stack(outputs[:: order.step], 1))
    return torch.stack(states[:: order.step], 1), state


class StepwiseLinear:
    """The products x Wᵀ + b of T steps, for W (p, d) and b (p,), computed one by one and clipped as one linear layer.

    They have the dtype of `like`, (B, T, ...); `more`, (B, T, p), is added to them. A computed weight is refused.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, like: Tensor, more: Tensor | None = None) -> None:
        self._inputs: list[Any] = []
        if isinstance(weight, PerExample):
            if not weight.is_matrix or weight.transposed:
                raise UserError(
                    f"{weight.origin.label} becomes a weight of a recurrent layer by a computation (weight_norm, say): "
                    "remove that, or freeze it."
                )
            weight, bias, added = weight.origin.stepwise_linear(weight, bias, like, self._inputs)
        else:
            added = like.new_zeros(()).expand(*like.shape[:2], len(weight))
        if torch.is_autocast_enabled(like.device.type):
            weight = weight.to(torch.get_autocast_dtype(like.device.type))
        self._weight = weight.t()
        for each in (bias, more):
            added = added if each is None else added + each
        self._added = added.unbind(1)

    def product(self, x: Tensor, t: int) -> Tensor:
        """The product of step t, (B, d) -> (B, p)."""
        if x.dtype == self._weight.dtype:
            return torch.addmm(self._added[t], x, self._weight)
        return self._added[t] + x.to(self._weight.dtype) @ self._weight

    def note(self, x: Tensor) -> None:
        """Store the inputs of all steps, (B, T, d), for the gradient."""
        self._inputs += [x.detach(), None]  # as `LinearRule` saves them


Maps = Sequence[Tensor]
"""For a GRU W_ih x + b_ih and W_hh h + b_hh, else their sum alone."""


def _lstm_step(maps: Maps, state: State) -> State:
    """c' = σ(f)∘c + σ(i)∘tanh(g), h' = σ(o)∘tanh(c'), for maps (B, 4H) of i, f, g and o."""
    i, f, g, o = reduce(torch.add, maps).chunk(4, 1)
    c = torch.addcmul(f.sigmoid() * state[1], i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def _gru_step(maps: Maps, state: State) -> State:
    """n = tanh(x_n + σ(r)∘h_n), h' = n + σ(z)∘(h - n), for maps (B, 3H) of r, z and n."""
    (x, x_n), (h, h_n) = (part.split((2 * state[0].shape[1], state[0].shape[1]), 1) for part in maps)
    r, z = (x + h).sigmoid().chunk(2, 1)
    return (torch.lerp(torch.addcmul(x_n, r, h_n).tanh(), state[0], z),)


STEPS: dict[str, Callable[[Maps, State], State]] = {
    "LSTM": _lstm_step,
    "GRU": _gru_step,
    "RNN_TANH": lambda maps, _: (reduce(torch.add, maps).tanh(),),
    "RNN_RELU": lambda maps, _: (reduce(torch.add, maps).relu(),),
}
"""The maps and the old state -> the new state."""


def _cell(
    mode: str, x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Any:
    """A cell: input (B, d) and state h (B, H), for an LSTM (h, c), -> the next state."""
    state = hx if mode == "LSTM" else (hx,)
    maps = (F.linear(x, w_ih, b_ih).to(state[0].dtype), F.linear(state[0], w_hh, b_hh).to(state[0].dtype))
    new = STEPS[mode](maps, state)
    return new if mode == "LSTM" else new[0]


for _mode in STEPS:
    in_place_of(getattr(torch, f"{_mode.lower()}_cell"))(partial(_cell, _mode))


def _initial(module: nn.RNNBase, x: Tensor, hx: Any) -> State:
    """Initial states of all layers and directions, each (layers · directions, B, H)."""
    if hx is not None:
        return tuple(hx) if module.mode == "LSTM" else (hx,)
    count = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [module.proj_size or module.hidden_size] + [module.hidden_size] * (module.mode == "LSTM")
    return tuple(x.new_zeros(count, len(x), size) for size in sizes)


def _hx(module: nn.RNNBase, states: State) -> Any:
    """The states in the form of the module's `hx`: a pair for an LSTM, else one tensor."""
    return states if module.mode == "LSTM" else states[0]


def _pack_as(x: Tensor, packed: PackedSequence) -> PackedSequence:
    """x (B, T, h), in the order of the batch, packed like `packed`."""
    x = x if packed.sorted_indices is None else x.index_select(0, packed.sorted_indices)
    lengths = (packed.batch_sizes.unsqueeze(1) > torch.arange(len(x), device="cpu")).sum(0)
    data = pack_padded_sequence(x, lengths, batch_first=True).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
