"""Runs an LSTM, GRU or RNN through a whole sequence as one node of autograd, forth and back.

Autograd would make a node of each product and each gate of each step. Here the derivatives of all gates of all steps
come first, in a few operations on the whole sequence, and a step back is two or three products with them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.clipping.precision import no_autocast
from groupwise.clipping.rules.weights import Late

State = tuple[Tensor, ...]
"""(h,) with h (B, H); of an LSTM (h, c), h (B, H or proj_size) and c (B, H)."""
Kept = tuple[Tensor, ...]

sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


def run_sequence(
    mode: str,
    x: Tensor,
    late: Late,
    state: State,
    project: Late | None = None,
    alive: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, State]:
    """All steps of one layer in one direction.

    Args:
        mode: LSTM, GRU, RNN_TANH or RNN_RELU.
        x: W_ih x + b_ih of all steps, (B, T, gates · H); an LSTM's gates are (i, f, g, o), a GRU's (r, z, n).
        late: the uses of W_hh and b_hh.
        state: before the first step.
        project: the uses of an LSTM's W_hr.
        alive: which examples have which steps, (B, T, 1); at the others the state stays. None: all have all.
        reverse: from the last step to the first.

    Returns:
        h after each step, (B, T, H or proj_size), and the state after the last.
    """
    through = (late.added, None if project is None else project.added)
    y, *last = _Sequence.apply(mode, late, project, alive, reverse, x, *through, *state)
    return y, tuple(last)


class _Sequence(torch.autograd.Function):
    """See `run_sequence`; the gradients of `added` are those of what the late weights gave."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: str,
        late: Late,
        project: Late | None,
        alive: Tensor | None,
        reverse: bool,
        x: Tensor,
        added: Tensor | None,
        added_by_projection: Tensor | None,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        order = range(x.shape[1] - 1, -1, -1) if reverse else range(x.shape[1])
        x = x.to(state[0].dtype)
        with no_autocast(x.device.type):
            if mode == "LSTM":
                y, c, kept = _lstm(x, late, project, state, alive, order)
            elif mode == "GRU":
                y, kept = _gru(x, late, state[0], alive, order)
            else:
                y, kept = _rnn(mode, x, late, state[0], alive, order)
            before = _before(y, state[0], reverse)
        late.note(before)
        ctx.mode, ctx.order, ctx.reverse = mode, order, reverse
        ctx.weight, ctx.projection = late.weight, None if project is None else project.weight
        ctx.save_for_backward(alive, before, *kept)
        last = (y, c) if mode == "LSTM" else (y,)
        return y, *(part[:, order[-1]].clone() for part in last)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_y: Tensor, to_h: Tensor, *to_c: Tensor) -> tuple[Tensor | None, ...]:
        alive, before, *kept = ctx.saved_tensors
        to_first = any(ctx.needs_input_grad[8:])
        with no_autocast(to_y.device.type):
            steps = _StepsBack(ctx.order, alive, ctx.weight, to_y, to_h, to_first)
            if ctx.mode == "LSTM":
                to_gates, *others = _lstm_back(steps, ctx.reverse, ctx.projection, to_c[0], *kept)
                found = to_gates, to_gates, *others
            elif ctx.mode == "GRU":
                to_x, to_gates, first = _gru_back(steps, before, *kept)
                found = to_x, to_gates, None, first
            else:
                to_gates, first = _rnn_back(steps, ctx.mode, *kept)
                found = to_gates, to_gates, None, first
        asked = ctx.needs_input_grad[5:]
        return *(None,) * 5, *(g if needed else None for g, needed in zip(found, asked, strict=True))


def _lstm(
    x: Tensor, late: Late, project: Late | None, state: State, alive: Tensor | None, order: Sequence[int]
) -> tuple[Tensor, Tensor, Kept]:
    """c' = σ(f)∘c + σ(i)∘tanh(g), h' = σ(o)∘tanh(c').

    Returns:
        h and c after each step; for the way back gates, c, tanh(c') and the first c.
    """
    h, first = state
    gates = _with_bias(x, late)
    size = first.shape[1]
    c, squashed, out = (first.new_empty(*x.shape[:2], size) for _ in range(3))
    y = out if project is None else h.new_empty(*x.shape[:2], h.shape[1])
    i, f, g, o = (part.unbind(1) for part in gates.split(size, 2))
    i_and_f = gates[..., : 2 * size].unbind(1)
    at, c_at, t_at, out_at, y_at = (part.unbind(1) for part in (gates, c, squashed, out, y))
    by_h, was = late.weight.t(), first
    for t in order:
        _add_product(at[t], h, by_h)
        i_and_f[t].sigmoid_(), g[t].tanh_(), o[t].sigmoid_()
        torch.mul(f[t], was, out=c_at[t]).addcmul_(i[t], g[t])
        torch.tanh(c_at[t], out=t_at[t])
        torch.mul(o[t], t_at[t], out=out_at[t])
        if project is not None:
            y_at[t].copy_(out_at[t].to(project.weight.dtype) @ project.weight.t())
        if alive is not None:
            _stay(alive[:, t], (y_at[t], h), (c_at[t], was))
        h, was = y_at[t], c_at[t]
    if project is not None:
        project.note(out)
    return y, c, (gates, c, squashed, first)


def _gru(x: Tensor, late: Late, h: Tensor, alive: Tensor | None, order: Sequence[int]) -> tuple[Tensor, Kept]:
    """n = tanh(x_n + σ(r)∘h_n), h' = n + σ(z)∘(h - n): h after each step; r, z and h_n, and n."""
    size = h.shape[1]
    by_state, n = torch.empty_like(x), x[..., 2 * size :].clone()
    by_state.copy_(late.bias) if late.bias is not None else by_state.zero_()
    y = torch.empty_like(n)
    x_at, r_and_z = x[..., : 2 * size].unbind(1), by_state[..., : 2 * size].unbind(1)
    r, z, h_n = (part.unbind(1) for part in by_state.split(size, 2))
    at, n_at, y_at = (part.unbind(1) for part in (by_state, n, y))
    by_h = late.weight.t()
    for t in order:
        _add_product(at[t], h, by_h)
        r_and_z[t].add_(x_at[t]).sigmoid_()
        n_at[t].addcmul_(r[t], h_n[t]).tanh_()
        torch.lerp(n_at[t], h, z[t], out=y_at[t])
        if alive is not None:
            _stay(alive[:, t], (y_at[t], h))
        h = y_at[t]
    return y, (by_state, n)


def _rnn(
    mode: str, x: Tensor, late: Late, h: Tensor, alive: Tensor | None, order: Sequence[int]
) -> tuple[Tensor, Kept]:
    """h' = tanh(x + W h), or relu: h after each step, twice."""
    y, by_h = _with_bias(x, late), late.weight.t()
    at = y.unbind(1)
    for t in order:
        _add_product(at[t], h, by_h)
        at[t].tanh_() if mode == "RNN_TANH" else at[t].relu_()
        if alive is not None:
            _stay(alive[:, t], (at[t], h))
        h = at[t]
    return y, (y,)


class _StepsBack:
    """The way from the gradient of h' to that of h, one step after the other."""

    def __init__(
        self, order: range, alive: Tensor | None, weight: Tensor, to_y: Tensor, to_h: Tensor, to_first: bool
    ) -> None:
        self.order, self.alive, self.to_first = order[::-1], alive, to_first
        self._weight, self._to_y = weight.to(to_y.dtype), to_y.unbind(1)
        self._ended = None if alive is None else (~alive).to(to_y.dtype).unbind(1)
        self._coming: Tensor | None = to_h

    def arrive(self, t: int) -> Tensor:
        """The gradient (B, h) of h after step t."""
        return self._to_y[t] if self._coming is None else self._to_y[t] + self._coming

    def leave(self, t: int, arrived: Tensor, to_gates: Tensor, beside: Tensor | None = None) -> None:
        """Go on before step t with the gradient of h by way of the product with W_hh, and `beside` it."""
        if t == self.order[-1] and not self.to_first:
            return
        self._coming = to_gates @ self._weight
        if beside is not None:
            self._coming.addcmul_(arrived, beside)
        elif self._ended is not None:
            self._coming.addcmul_(arrived, self._ended[t])

    @property
    def first(self) -> Tensor | None:
        """The gradient of h before the first step, where it is asked for."""
        return self._coming if self.to_first else None


def _lstm_back(
    steps: _StepsBack,
    reverse: bool,
    projection: Tensor | None,
    to_c: Tensor,
    gates: Tensor,
    c: Tensor,
    squashed: Tensor,
    first: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of gates (B, T, 4H), of the projection's products (B, T, p) and of the first h and c."""
    i, f, g, o = gates.chunk(4, 2)
    rates = torch.stack(
        [
            sigmoid_backward(g, i),
            sigmoid_backward(_before(c, first, reverse), f),
            tanh_backward(i, g),
            sigmoid_backward(squashed, o),
        ],
        2,
    )  # of c' by the first three gates, and of h' by the last
    by_c = tanh_backward(o, squashed)
    if steps.alive is not None:
        rates *= steps.alive.unsqueeze(3)
        by_c *= steps.alive
        f = torch.where(steps.alive, f, 1.0)
    of_c, of_h, all_at = (part.unbind(1) for part in (rates[:, :, :3], rates[:, :, 3], rates.flatten(2)))
    by_c_at, f_at = by_c.unbind(1), f.unbind(1)
    to_products = None if projection is None else c.new_empty(*c.shape[:2], len(projection))
    for t in steps.order:
        arrived = to_out = steps.arrive(t)
        if projection is not None and to_products is not None:
            to_products[:, t] = arrived if steps.alive is None else arrived * steps.alive[:, t]
            to_out = to_products[:, t] @ projection.to(arrived.dtype)
        to_c = torch.addcmul(to_c, to_out, by_c_at[t])
        of_c[t].mul_(to_c.unsqueeze(1))
        of_h[t].mul_(to_out)
        to_c = to_c * f_at[t]
        steps.leave(t, arrived, all_at[t])
    return rates.flatten(2), to_products, steps.first, to_c


def _gru_back(steps: _StepsBack, before: Tensor, by_state: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x (B, T, 3H), of what the states gave (B, T, 3H), and of the first h."""
    r, z, h_n = by_state.chunk(3, 2)
    by_n = tanh_backward(1.0 - z, n)
    rates = torch.stack([sigmoid_backward(by_n * h_n, r), sigmoid_backward(before - n, z), by_n * r, by_n], 2)
    if steps.alive is not None:
        rates *= steps.alive.unsqueeze(3)
        z = torch.where(steps.alive, z, 1.0)
    at, by_state_at, z_at = (part.unbind(1) for part in (rates, rates[:, :, :3].flatten(2), z))
    for t in steps.order:
        arrived = steps.arrive(t)
        at[t].mul_(arrived.unsqueeze(1))
        steps.leave(t, arrived, by_state_at[t], z_at[t])
    to_x = torch.cat([rates[:, :, :2].flatten(2), rates[:, :, 3]], 2)
    return to_x, rates[:, :, :3].flatten(2), steps.first


def _rnn_back(steps: _StepsBack, mode: str, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of x + W h, (B, T, H), and of the first h."""
    rates = 1.0 - y.square() if mode == "RNN_TANH" else (y > 0).to(y.dtype)
    if steps.alive is not None:
        rates *= steps.alive
    at = rates.unbind(1)
    for t in steps.order:
        arrived = steps.arrive(t)
        at[t].mul_(arrived)
        steps.leave(t, arrived, at[t])
    return rates, steps.first


def _with_bias(x: Tensor, late: Late) -> Tensor:
    """A new tensor."""
    return x.clone() if late.bias is None else x + late.bias.to(x.dtype)


def _add_product(target: Tensor, h: Tensor, by_h: Tensor) -> None:
    """target += h W, in W's precision; in place, and counted as the product that it is."""
    if by_h.dtype == target.dtype:
        torch.addmm(target, h, by_h, out=target)
    else:
        target.add_(h.to(by_h.dtype) @ by_h)


def _stay(alive: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """Where a step is beyond an example's end, what it gave becomes what was before."""
    for new, old in pairs:
        new.copy_(torch.where(alive, new, old))


def _before(after: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """States before each step from those after it, (B, T, n)."""
    parts = [after[:, 1:], first.unsqueeze(1)] if reverse else [first.unsqueeze(1), after[:, :-1]]
    return torch.cat(parts, 1)
