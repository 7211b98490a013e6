"""Rows are not masked until an example is left out; a batch with such an example is begun again with masks."""

import pytest
import torch
from torch import nn

from groupwise.errors import UserError
from groupwise.training.microbatches import TaskSums
from tests.clipping.modes import FEW, attached
from tests.clipping.traced import clip_batch
from tests.tiny_training import ADAPTIVE_LAYER, FIXED_LAYER, GHOST
from tests.training.test_step import STEPS, after, make_trainer

on_a_gpu = pytest.mark.usefixtures("as_on_a_gpu")


def network(bad: float) -> tuple[nn.Module, torch.Tensor]:
    """Convolutions and layers that see several positions; the first of four images holds a `bad` number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(2), nn.Linear(4, 5), nn.LayerNorm(5))
    x = torch.randn(4, 2, 4, 4).double()
    x[0, 0, 0, 0] = bad
    return model.double(), x


def sums(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@on_a_gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize("mode", FEW)
def test_sums_without_masks_match_masked_ones_or_are_nonfinite(mode, bad):
    model, x = network(bad)
    found = {}

    def losses_of(rows: torch.Tensor) -> torch.Tensor:
        return model(rows).flatten(1).square().sum(1)

    with attached(model, mode, 0.3) as engine:
        for masks in (True, False):
            for last in (1, 0):  # without the first image, and with it
                engine.masks_rows = masks
                model.zero_grad()
                engine.reset()
                clip_batch(engine, losses_of, x[last:])
                found[masks, last] = sums(model)
                assert engine.has_nonfinite == (engine.nonfinite > 0 and not masks)
                if last and masks is False:
                    assert torch.equal(found[False, 1], found[True, 1])  # no example is left out
        with pytest.raises(UserError, match="masks_rows was False: begin the batch again"):
            engine.sensitivity("add_remove")
        assert engine.nonfinite == 1
        engine.reset()
        assert not engine.has_nonfinite and engine.sensitivity("add_remove").thresholds.sum() > 0
    assert not found[False, 0].isfinite().all() or bad == 1e200
    torch.testing.assert_close(found[True, 0], found[True, 1], rtol=1e-12, atol=1e-15)


class Masking(TaskSums):
    """Masks rows from the beginning."""

    def _run_all(self, private, *given):
        private.engine.masks_rows = True
        return super()._run_all(private, *given)


@on_a_gpu
@pytest.mark.parametrize("clip", [ADAPTIVE_LAYER, FIXED_LAYER, GHOST], ids=lambda clip: clip.name)
def test_a_batch_with_a_nonfinite_example_is_begun_again_with_masks(clip):
    batches = [make_trainer(clip).private.sampler.indices(step) for step in range(STEPS)]
    bad_row = int(batches[1][9])

    def run(masks: bool, bad: bool) -> tuple[torch.Tensor, list[int], bool]:
        trainer, seen = make_trainer(clip, microbatch=8), []
        if bad:
            trainer.task.x[bad_row] = float("nan")
        if masks:
            trainer.private.sums = Masking(trainer.task, 8)
        read = trainer.task.read
        trainer.task.read = lambda examples: seen.append(len(examples)) or read(examples)
        steps = after(trainer)
        return steps, seen, trainer.private.engine.masks_rows

    (always, once, _), (later, again, _) = run(True, True), run(False, True)
    assert torch.equal(later, always) and later.isfinite().all()
    twice = sum(len(batch) for batch in batches if bad_row in batch)
    assert sum(again) == sum(once) + twice  # other batches are computed once
    (always, once, _), (later, again, masks) = run(True, False), run(False, False)
    assert torch.equal(later, always) and again == once and not masks
