"""The loop of a run on the emulated GPU: the host waits once a step, for the counts; it sends an index a microbatch."""

import json

STEPS = """
import json
from contextlib import nullcontext
import torch
from benchmarks.emulated.device import EmulatedGPU, emulate, on_device
from benchmarks.emulated.step import RATES, EmulatedNoise
from groupwise.clipping import attach, per_layer
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.data.images import normalize
from groupwise.models import wide_resnet
from groupwise.privacy import make_plan
from groupwise.tasks.image_classification import ImageClassification
from groupwise.training.from_config import autocast, make_optimizer, make_schedule, make_thresholds
from groupwise.training.mechanism import Mechanism
from groupwise.training.step import Trainer

device, gpu, last = torch.device("cuda", 0), EmulatedGPU(), torch.channels_last
with torch.device("meta"):
    model = wide_resnet(depth=10, width=1, block_order="deepmind", weight_standardization=True).to(memory_format=last)
    images, labels = torch.empty(200, 3, 32, 32, dtype=torch.uint8), torch.empty(200, dtype=torch.int64)
Mechanism.microbatch = lambda self, step, start: nullcontext()  # a GPU's generators are not emulated
with gpu:
    emulate(model)
    split = on_device(images), on_device(labels)
    prepare = lambda some: normalize(some, (0.5,) * 3, (0.25,) * 3).contiguous(memory_format=last)
    task = ImageClassification(model, split, split, prepare, {}, autocast("float32", device))
    engine = attach(model, per_layer(model), 0.1, rates=RATES)
    sizes = dict(dataset_size=200, expected_batch_size=64, steps=2, num_groups=len(engine.groups), quantile_budget=0.1)
    plan = make_plan(**sizes, delta=1e-5, noise_multiplier=1.0, accountant="rdp")
    optimizer = make_optimizer(model.parameters(), OptimConfig())
    mechanism = Mechanism(
        model=model, engine=engine, thresholds=make_thresholds(ClipConfig(quantile_budget=0.1), plan), plan=plan,
        noise=EmulatedNoise.from_seed(0), allocation="global", optimizer=optimizer, device=device,
    )
    engine.asks_order = False  # a device without numbers shows no gradients
    engine.masks_rows = False  # as build_trainer has it
    trainer = Trainer(task, mechanism, make_schedule(optimizer, OptimConfig(), 2), 32)
    for size in (33, 37):  # two sizes tell which axis is the batch, as the check before training does
        task.losses(range(size))
    rows = []
    for step in range(2):
        with gpu.counted() as passed:
            trainer._accumulate(mechanism.open(step), step)
        drawn = mechanism.drawn
        with gpu.counted() as rest:
            mechanism.close()
        rows.append({"microbatches": -(-drawn // 32), "passed": passed, "rest": rest})
print(json.dumps(rows))
"""


def test_the_host_waits_for_the_counts_alone(python) -> None:
    for row in json.loads(python(STEPS).splitlines()[-1]):
        assert row["passed"]["waits"] == {"clipping/factors.py:Counts._on_host": 1}
        uploads = {
            "clipping/factors.py:Counts.set_thresholds": 1,
            "clipping/engine.py:ClippingEngine.set_thresholds": 1,
            "training/task.py:to_device": row["microbatches"],
        }
        assert row["passed"]["uploads"] == uploads
        assert not row["rest"]["waits"]
        assert row["rest"]["uploads"] == {"privacy/counted_noise.py:CountedNoise.add_together_": 1}
        assert row["rest"]["launches"] < 250, "noise of all parameters is drawn together"
