"""The generic fallback: exact per-example gradients of any module by vmap over examples.

It owns every trainable parameter of the module it stands for, children included, and costs a forward and a backward
for each example: right first, fast never. The module must treat the first axis of every tensor it takes and gives
as the batch.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_unflatten

from groupwise.clipping.rules.base import Gradients, Saved, Wanted, upcast
from groupwise.clipping.rules.per_example import PerExampleRule
from groupwise.errors import UserError


class FallbackRule(PerExampleRule):
    """Any module with parameters of its own. `saved` holds the call's tensors; `g` one gradient for each output."""

    autocast = "float32"

    def __init__(self, module: nn.Module, names: tuple[str, ...], label: str) -> None:
        super().__init__(module)
        self.parameter_names = names  # type: ignore[misc]
        self.label = label
        self.bypass: Callable[[], AbstractContextManager[None]] = nullcontext  # set by the engine: run without it
        hooked = [name or label for name, part in module.named_modules() if part._forward_pre_hooks]
        if hooked:
            raise UserError(
                f"Layer {label!r} ({type(module).__name__}) has forward pre-hooks (at {hooked[0]!r}), through which "
                "its parameters may be used unseen; use torch.nn.utils.parametrizations, or a layer type with a rule."
            )
        random = [name for name, part in module.named_modules() if _drops(part)]
        if random:
            raise UserError(
                f"Layer {label!r} ({type(module).__name__}) has no rule, and dropout inside (at {random[0]!r}): the "
                "generic fallback would draw other masks than the forward pass. Set it to 0, or register a rule."
            )
        warnings.warn(
            f"groupwise has no rule for {type(module).__name__}: layer {label!r} is clipped exactly, but slowly, "
            "by the generic per-example fallback.",
            stacklevel=2,
        )

    def compute(self, values: tuple[Tensor, ...], call: "Call", parameters: tuple[Tensor, ...]) -> Any:
        """Run the module's own forward on a call's tensors with the given parameters."""
        args, kwargs = call.rebuild(values)
        named = dict(zip(self.parameter_names, parameters, strict=True))
        with self.bypass():
            return functional_call(self.module, named, args, kwargs)

    # A fallback call has many inputs and outputs, so it has an autograd Function of its own (see gate.py), which asks
    # only for per-example gradients: `saved` = (call, parameters, *values), g = tuple of output gradients.
    def forward(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Saved]:
        raise UserError(f"Layer {self.label!r} was called as a single-input layer.")

    def input_gradient(self, saved: Saved, g: Tensor) -> Tensor:
        raise UserError(f"Layer {self.label!r} was called as a single-input layer.")

    def examples(self, saved: Any, g: Any, rows: slice) -> Any:
        call, parameters, *values = saved
        return (call, parameters, *(v[rows] for v in values)), tuple(t[rows] for t in g)

    def per_example_gradients(self, saved: Any, g: Any, wanted: Wanted) -> Gradients:
        call, parameters, *values = saved
        trained = {
            name: upcast(p) for name, p, want in zip(self.parameter_names, parameters, wanted, strict=True) if want
        }
        fixed = {name: p for name, p, want in zip(self.parameter_names, parameters, wanted, strict=True) if not want}

        def one_example(values_i: tuple[Tensor, ...], g_i: tuple[Tensor, ...]) -> dict[str, Tensor]:
            def run(chosen: dict[str, Tensor]) -> tuple[Tensor, ...]:
                args, kwargs = call.rebuild(tuple(v.unsqueeze(0) for v in values_i))
                out = functional_call(self.module, {**fixed, **chosen}, args, kwargs)
                return tuple(output.squeeze(0) for output in Tree(out).values)

            return vjp(run, trained)[1](g_i)[0]

        try:
            with self.bypass():
                gradients = vmap(one_example, randomness="error")(tuple(values), tuple(g))
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"The generic fallback cannot take layer {self.label!r} ({type(self.module).__name__}): {error} "
                "Set its dropout to 0, freeze it, or register a rule for it."
            ) from error
        return tuple(gradients.get(name) for name in self.parameter_names)


def _drops(module: nn.Module) -> bool:
    """Whether it draws masks in training: a dropout layer, or one with a rate of its own (attention, recurrent)."""
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float | int) and rate > 0


class Tree:
    """Nested arguments or results with their tensors pulled out and everything else kept."""

    def __init__(self, nested: Any) -> None:
        leaves, self.spec = tree_flatten(nested)
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self.rest = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.values: tuple[Tensor, ...] = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def rebuild(self, values: Iterable[Tensor]) -> Any:
        """The same nest with other tensors in the same places."""
        tensors, rest = iter(values), iter(self.rest)
        return tree_unflatten([next(tensors) if tensor else next(rest) for tensor in self.is_tensor], self.spec)


class Call(Tree):
    """A call's (args, kwargs), and later the nest of its results."""

    outputs: Tree


class FallbackForward(torch.autograd.Function):
    """Run a module as one opaque operation: gradients for its inputs here, for its parameters in `receive`."""

    @staticmethod
    def forward(
        ctx: Any, rule: FallbackRule, call: Call, receive: Any, probe: Tensor, count: int, *tensors: Tensor
    ) -> Any:
        values, parameters = tensors[:count], tensors[count:]
        call.outputs = Tree(rule.compute(values, call, parameters))
        if not all(value.is_floating_point() for value in call.outputs.values):
            raise UserError(
                f"Layer {rule.label!r} returns tensors of integers: wrap it in a module that returns floats only."
            )
        ctx.rule, ctx.call, ctx.receive, ctx.count = rule, call, receive, count
        ctx.save_for_backward(*tensors)
        outputs, call.outputs.values = call.outputs.values, ()
        return outputs

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: a checkpointed forward pass unpacks them once only
        values, parameters = saved[: ctx.count], saved[ctx.count :]
        needed = [i for i, need in enumerate(ctx.needs_input_grad[5 : 5 + ctx.count]) if need]
        gradients: list[Tensor | None] = [None] * ctx.count
        with torch.autocast(g[0].device.type, enabled=False):
            if needed:
                with torch.enable_grad():
                    fresh = tuple(v.detach().requires_grad_(i in needed) for i, v in enumerate(values))
                    outputs = Tree(ctx.rule.compute(fresh, ctx.call, parameters)).values
                    inputs = torch.autograd.grad(outputs, [fresh[i] for i in needed], g)
                for i, gradient in zip(needed, inputs, strict=True):
                    gradients[i] = gradient
            squares = ctx.receive((ctx.call, parameters, *values), tuple(g))
        return None, None, None, squares, None, *gradients, *[None] * len(parameters)
