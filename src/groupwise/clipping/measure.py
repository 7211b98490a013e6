"""Measures single examples' gradients, without privacy: their norms, and their products with a direction.

Both are for data attribution, outliers and mislabelled examples. They come straight from the data: publish neither.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from groupwise.clipping.autograd import run_backward
from groupwise.clipping.checks import check_losses
from groupwise.clipping.cost_model import Formula
from groupwise.clipping.engine import ClippingEngine, attach
from groupwise.clipping.microbatches import NOT_NAMED
from groupwise.clipping.partition import Partition, per_layer, refuse_mixing
from groupwise.clipping.verification.independence import kept_buffers
from groupwise.clipping.verification.randomness import Generators
from groupwise.errors import UserError, did_you_mean

Batch = TypeVar("Batch")


def gradient_norms(
    model: nn.Module,
    batches: Iterable[Batch],
    losses: Callable[[Batch], Tensor],
    partition: Partition | None = None,
    *,
    formula: Formula = "auto",
    batch_axis: int = 0,
) -> dict[str, Tensor]:
    """‖g_k^(i)‖ of each example's loss in each group (Figures 2 and 5 of the paper), by the engine that clips.

    The norms are not private: each is one example's own, without noise. Nothing is clipped and nothing changed:
    parameters, their .grad, buffers and the default generators are as before, after an error too.

    Args:
        model: whose parameters train; nothing may be attached to it.
        batches: examples in microbatches, as many at a time as there is memory for.
        losses: one loss per example of a batch, (B,), from `model`.
        partition: groups; None is one a layer, `flat(model)` the whole gradient.
        formula: "auto" raises norms of cancelling terms a little, in float32 (docs/sharp_edges.md, "Numbers");
            "materialize" measures them exactly.
        batch_axis: which axis of the model's first input tensor counts examples, 0 or 1.

    Returns:
        Group's name, in the model's own order -> norms of all examples in the order of `batches`, (N,) float64, on the
        CPU.

    Raises:
        UserError: as `attach` and `ClippingEngine.backward` do.
    """
    groups = per_layer(model) if partition is None else partition
    found: list[Tensor] = []
    with unchanged(model), attach(model, groups, 1.0, formula=formula, batch_axis=batch_axis) as engine:
        for batch in _not_empty(batches):
            found.append(norms_of_losses(engine, losses(batch)).cpu())
    norms = torch.cat(found, dim=1) if found else torch.empty(len(groups), 0, dtype=torch.float64)
    return {group.name: row for group, row in zip(groups, norms, strict=True)}


def norms_of_losses(engine: ClippingEngine, losses: Tensor) -> Tensor:
    """‖g_k^(i)‖ of losses (B,) from the engine's model, (K, B) float64; no .grad and no count changes.

    Raises:
        UserError: as `ClippingEngine.backward` does.
    """
    check_losses(losses)
    engine.check_output(losses)
    with engine.norms_of(NOT_NAMED, len(losses)):
        run_backward(losses)
    return engine.per_example_norms


def gradient_products(
    model: nn.Module,
    batches: Iterable[Batch],
    losses: Callable[[Batch], Tensor],
    direction: Mapping[str, Tensor],
) -> Tensor:
    """⟨g^(i), v⟩ of each example's gradient with a direction v, in one forward pass: how losses change along v.

    With v the gradient of the loss on other examples, that is one checkpoint's term of TracIn (Pruthi et al. 2020, eq.
    1, without the learning rate): a step on an example with a negative product makes the loss on these worse. Forward
    mode gives all examples' products at once, exactly; no example's gradient is formed.

    The products are not private, as the norms are not. Nothing is changed, as in `gradient_norms`.

    Args:
        model: any that forward mode can follow, with or without a rule for its layers; nothing may be attached to it.
        batches, losses: as in `gradient_norms`; losses may come from no other example.
        direction: v, name of a parameter -> tensor of its shape; parameters that are not named have v = 0.

    Returns:
        Products of all examples in the order of `batches`, (N,), in the losses' type, on the CPU.

    Raises:
        UserError: a direction of another model or shape, or that no loss depends on; a layer that mixes examples;
            losses that are not one an example; an operation that torch has no forward mode for.
    """
    refuse_mixing(model)
    moved = _tangents(model, direction)
    wrapped = _Losses(model, losses)
    found: list[Tensor] = []
    with unchanged(model), _plain_kernels(model), _in_one_sentence():
        for batch in _not_empty(batches):
            with forward_mode.dual_level():
                duals = {f"model.{name}": forward_mode.make_dual(p, v) for name, (p, v) in moved.items()}
                each = functional_call(wrapped, duals, (batch,))
                check_losses(each)
                products = forward_mode.unpack_dual(each).tangent
                if products is None:
                    raise UserError(
                        "The losses depend on no parameter that direction names: compute them from this very model, "
                        "with no engine attached, and name parameters that take part."
                    )
                found.append(products.detach().cpu())
    return torch.cat(found) if found else torch.empty(0)


def _not_empty(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches that are not known to be empty, which not every model runs on."""
    return (batch for batch in batches if not isinstance(batch, Sized) or len(batch))


class _Losses(nn.Module):
    """A loss of a model as a module, whose parameters `functional_call` can replace."""

    def __init__(self, model: nn.Module, losses: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self._losses = model, losses

    def forward(self, batch: Any) -> Tensor:
        return self._losses(batch)


def _tangents(model: nn.Module, direction: Mapping[str, Tensor]) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Parameters and what they move by, by name."""
    parameters = dict(model.named_parameters())
    found = {}
    for name, v in direction.items():
        if name not in parameters:
            raise UserError(
                f"direction names {name!r}, which is no parameter of the model{did_you_mean(name, parameters)}: give "
                "names as in model.named_parameters()."
            )
        p = parameters[name]
        if v.shape != p.shape:
            raise UserError(
                f"direction has shape {tuple(v.shape)} for parameter {name!r} of shape {tuple(p.shape)}: give the same."
            )
        found[name] = p, v.detach().to(p)
    return found


@contextmanager
def unchanged(model: nn.Module) -> Iterator[Generators]:
    """Afterwards buffers and the default generators, which it yields, are as before."""
    generators = Generators({parameter.device for parameter in model.parameters()})
    with generators.kept(), kept_buffers(model), torch.enable_grad():
        yield generators


@contextmanager
def _plain_kernels(model: nn.Module) -> Iterator[None]:
    """Inside, attention and recurrence do without the fused kernels, which have no forward mode."""
    libraries: Any = (torch.backends.mkldnn, torch.backends.cudnn)
    before = [library.enabled for library in libraries]
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    try:
        for library in libraries if recurrent else ():
            library.enabled = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            if library.enabled != enabled:
                library.enabled = enabled


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "forward AD" not in str(error) and "forward mode AD" not in str(error):
            raise
        raise UserError(
            "The products need torch's forward mode, which an operation of the model or the loss does without: write "
            f"it of plain operations, and detach what is attached. torch says: {str(error).splitlines()[0]}"
        ) from error
