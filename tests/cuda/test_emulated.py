"""The emulated GPU, private steps on it in every mode, layout and precision, and the training loop of a run.

The tests are in one file so that they share one emulation process.
"""

import json
from typing import Any

import pytest

# -- the device: it refuses what CUDA refuses, returns the layouts of cuDNN, and counts --------------------------------

LAYOUTS = """
last = torch.channels_last
with EmulatedGPU():
    x = torch.empty(2, 8, 6, 6, device="cuda").to(memory_format=last)
    w = torch.empty(4, 8, 3, 3, device="cuda", requires_grad=True)
    y = torch.nn.functional.conv2d(x, w)
    print(y.is_contiguous(memory_format=last), y.is_contiguous())
    plain = torch.nn.functional.conv2d(x.contiguous(), w)
    print(plain.is_contiguous())
    grad, = torch.autograd.grad(y.sum(), w)
    print(grad.is_contiguous(memory_format=last), grad.device)
"""

REFUSALS = """
def refusal(run):
    try:
        run()
    except Exception as error:
        return type(error).__name__
    return "nothing"

def backward(groups):
    x, each = torch.empty(1, groups, 2, device="cuda"), torch.empty(1, groups, device="cuda")
    mask = [True, True, True]
    torch.ops.aten.native_group_norm_backward(x, x, each, each, each[0], 1, groups, 2, groups, mask)

with EmulatedGPU():
    x = torch.empty(2, 8, 6, 6, device="cuda")
    last = x.to(memory_format=torch.channels_last)
    one = torch.ones(8, device="cuda")
    norm = lambda x: torch.native_group_norm(x, one, one, 2, 8, 36, 4, 1e-5)
    print(refusal(lambda: norm(last)), refusal(lambda: norm(x)))
    print(refusal(lambda: torch.nn.functional.group_norm(last, 4, one, one)))  # copies first, as CUDA does
    print(refusal(lambda: x.sum().item()), refusal(lambda: bool((x > 0).all())), refusal(lambda: x[x > 0]))
    print(refusal(lambda: x + torch.ones(8, 6, 6)), refusal(lambda: x + torch.tensor(1.0)))
    print(refusal(lambda: backward(65535)), refusal(lambda: backward(65536)))
    print(refusal(lambda: torch.ones(2) + 1))
"""

COUNTS = """
with EmulatedGPU() as gpu:
    a, b = torch.empty(10, 20, device="cuda"), torch.empty(20, 30, device="cuda")
    with gpu.counted() as row:
        c = (a @ b).t().view(-1, 10)
        c.add_(1)
        torch._foreach_mul_([a, b], 2.0)
    print(row["operations"], row["launches"], row["bytes"], row["waits"])
    with gpu.counted() as row:
        a @ a.t()  # one matrix, read once
        a.new_zeros(3)
        b.as_strided((6, 10), (5, 1)).contiguous()  # overlapping rows of ten numbers with stride five
    print(row["bytes"])
    with gpu.counted() as row:
        host = c.cpu()
        up = torch.ones(3).to("cuda")
    print(host.device, host.sum().item(), sum(row["waits"].values()), sum(row["uploads"].values()))
"""


@pytest.fixture(scope="module")
def outputs(on_gpu) -> tuple[str, str, str]:
    """The output of each of them, from one process."""
    layouts, refusals, counts = on_gpu("\nprint('==')\n".join((LAYOUTS, REFUSALS, COUNTS))).split("==\n")
    return layouts, refusals, counts


def test_convolution_returns_channels_last_if_an_operand_is(outputs) -> None:
    assert outputs[0].split() == ["True", "False", "True", "True", "cuda:0"]


def test_operations_that_cuda_refuses_are_refused(outputs) -> None:
    lines = [line.split() for line in outputs[1].splitlines()]
    assert lines[0] == ["Refused", "nothing"]
    assert lines[1] == ["nothing"]
    assert lines[2] == ["Waits", "Waits", "Waits"]
    assert lines[3] == ["FakeTensorDeviceMismatchError", "nothing"]  # two devices, but a scalar may be on the host
    assert lines[4] == ["nothing", "Refused"]
    assert lines[5] == ["nothing"]  # CPU tensors are real


def test_operations_bytes_and_copies_are_counted(outputs) -> None:
    counted, once, copied = outputs[2].splitlines()
    product, added, scaled = 4 * (200 + 600 + 300), 4 * 2 * 300, 4 * 2 * (200 + 600)
    assert counted == f"5 3 {product + added + scaled} {{}}"
    assert int(once) == 4 * ((200 + 100) + 3 + (35 + 60))
    assert copied.split() == ["cpu", "0.0", "1", "1"]


# -- steps: forward, backward, release and update ----------------------------------------------------------------------

WAITS = {"clipping/thresholds_and_counts.py:ThresholdsAndCounts._on_host"}
"""Where a step synchronises: once, for the counts of all groups at the end of the batch."""


def check(rows: dict[tuple[str, ...], dict[str, Any]]) -> None:
    for case, row in rows.items():
        assert "refused" not in row, (case, row["refused"])
        assert set(row["waits"]) <= WAITS, (case, row["waits"])
        assert all(count == 1 for count in row["waits"].values()), (case, row["waits"])


TINY, FLOATS, TEXT = "tiny=true", ("tiny=true", "precision=float32"), ("tiny=true", "layers=2")
FAST = {
    "images": ["model=wrn16_4_ws", "mode=adaptive_layer", "layout=contiguous", *FLOATS],
    "images in channels_last": ["model=wrn16_4_ws", "mode=flat,fixed_layer", "layout=channels_last", *FLOATS],
    "autocast in channels_last": [
        *("model=wrn16_4_conv", "mode=none,ghost,adaptive_layer"),
        *("precision=bfloat16", "layout=channels_last", TINY),
    ],
    "text, adaptive": ["model=roberta_base", "mode=adaptive_layer", *TEXT],
    "gpt2, adaptive": ["model=gpt2", "mode=adaptive_layer", "precision=float32", *TEXT],
    "text, flat": ["model=gpt2_untied", "mode=flat", "precision=bfloat16", *TEXT],
    "releases": [
        *("model=gpt2,roberta_base", "mode=adaptive_layer", "layout=contiguous"),
        *("precision=float32", "layers=1", "batch=2"),
    ],
    "adapters": ["model=lora_gpt2", "mode=flat", "precision=float32", *TEXT],
}
"""Each model, mode, layout and precision at least once; all combinations are slow."""


@pytest.fixture(scope="module")
def fast(emulate_several) -> dict[str, dict[tuple[str, ...], dict[str, Any]]]:
    return dict(zip(FAST, emulate_several(list(FAST.values())), strict=True))


@pytest.mark.parametrize("which", FAST)
def test_every_model_mode_and_layout_runs(fast, which) -> None:
    assert fast[which]
    check(fast[which])


BUDGETS = {
    ("gpt2", "none"): (850, 25.0),
    ("gpt2", "adaptive_layer"): (1560, 28.8),
    ("gpt2", "flat"): (1440, 27.8),
    ("gpt2", "ghost"): (2120, 42.0),
    ("gpt2_untied", "adaptive_layer"): (1560, 28.6),
    ("roberta_base", "adaptive_layer"): (1520, 9.3),
    ("roberta_base", "flat"): (1440, 9.2),
    ("lora_gpt2", "adaptive_layer"): (1500, 31.5),
    ("wrn16_4_ws", "adaptive_layer"): (1180, 58.7),
    ("wrn16_4_ws", "flat"): (1180, 54.9),
    ("wrn16_4_ws", "ghost"): (1580, 72.0),
}
"""Upper bounds of kernels and GB of a forward and backward pass in float32, contiguous."""
SHALLOW = {("gpt2", "adaptive_layer"): 410, ("roberta_base", "adaptive_layer"): 430, ("lora_gpt2", "flat"): 340}
"""Upper bounds of kernels with two transformer blocks of any size."""

RELEASES = {"gpt2": (215, 3.55), "roberta_base": (295, 3.55), "wrn16_4_ws": (105, 0.1)}
"""Upper bounds of kernels and GB of noise, division by B, the optimiser's first step and new thresholds; Philox by
plain operations moves 133 GB."""
SHALLOW_RELEASES = {"gpt2": (35, 1.35), "roberta_base": (47, 1.35)}
"""The bounds with one transformer block."""


def over(rows: dict[tuple[str, ...], dict[str, Any]], budgets: dict[tuple[str, str], tuple[int, float]]) -> list[str]:
    """The cases that exceed their budget."""
    found = {key: rows[(*key, "contiguous", "float32")] for key in budgets}
    return [
        f"{key}: {found[key]['launches']} kernels, {found[key]['bytes'] / 1e9:.1f} GB for {budget}"
        for key, budget in budgets.items()
        if found[key]["launches"] > budget[0] or found[key]["bytes"] > 1e9 * budget[1]
    ]


def test_two_blocks_stay_within_their_kernel_budget(fast) -> None:
    text = fast["text, adaptive"] | fast["gpt2, adaptive"] | fast["adapters"]
    assert not over(text, {key: (kernels, 1.0) for key, kernels in SHALLOW.items()})


def check_releases(rows: dict[tuple[str, ...], dict[str, Any]], budgets: dict[str, tuple[int, float]]) -> None:
    for model, (kernels, size) in budgets.items():
        row = rows[(model, "adaptive_layer", "contiguous", "float32")]
        assert row["rest_launches"] <= kernels and row["rest_bytes"] <= 1e9 * size, (model, row)


def test_release_stays_within_its_budget(fast) -> None:
    check_releases(fast["releases"], SHALLOW_RELEASES)


@pytest.mark.slow
def test_every_release_stays_within_its_budget(emulate) -> None:
    rows = emulate(f"model={','.join(RELEASES)}", "mode=adaptive_layer", "precision=float32", "layout=contiguous")
    check_releases(rows, RELEASES)


@pytest.mark.slow
def test_every_model_stays_within_its_budget(emulate) -> None:
    models, modes = (",".join(sorted({key[i] for key in BUDGETS})) for i in range(2))
    rows = emulate(f"model={models}", f"mode={modes}", "precision=float32", "layout=contiguous")
    assert not over(rows, BUDGETS)


HALF_BUDGETS = {
    ("gpt2", "contiguous"): (2200, 31.7),
    ("wrn16_4_ws", "contiguous"): (1310, 50.0),
    ("wrn16_4_ws", "channels_last"): (1340, 50.2),
}
"""The bounds in bfloat16 with adaptive_layer."""


@pytest.mark.slow
def test_bfloat16_stays_within_its_budget(emulate) -> None:
    rows = emulate("model=gpt2,wrn16_4_ws", "mode=adaptive_layer", "precision=bfloat16")
    for (model, layout), (kernels, size) in HALF_BUDGETS.items():
        row = rows[(model, "adaptive_layer", layout, "bfloat16")]
        assert row["launches"] <= kernels and row["bytes"] <= 1e9 * size, (model, layout, row)


@pytest.mark.slow
def test_every_model_runs_in_every_mode(emulate) -> None:
    check(emulate("tiny=true"))


# -- the loop: the host synchronises once per step, for the counts, and uploads one index per microbatch ---------------

LOOP = """
import json
from contextlib import ExitStack, nullcontext
import torch
from benchmarks.emulated.device import EmulatedGPU, emulate, on_device
from benchmarks.emulated.step import RATES, EmulatedNoise
from groupwise.clipping import attach, per_layer
from groupwise.config.schema import ClipConfig, OptimConfig
from groupwise.data.images import normalize
from groupwise.models.image_networks import WideResNet
from groupwise.privacy import make_plan
from groupwise.tasks.image_classification import ImageClassification
from groupwise.training.from_config import autocast, make_optimizer, make_thresholds
from groupwise.training.private_step import PrivateStep
from groupwise.training.microbatches import TaskSums

device, gpu, last = torch.device("cuda", 0), EmulatedGPU(), torch.channels_last
prepare = lambda some: normalize(some, (0.5,) * 3, (0.25,) * 3).contiguous(memory_format=last)
PrivateStep.microbatch = lambda self, step, start: nullcontext()  # a GPU's generators are not emulated
torch.cuda.is_current_stream_capturing = lambda: True  # nor are their offsets read
torch.cuda.default_generators = (None,)

def make_task(place):
    model = WideResNet(depth=10, width=1, weight_standardization=True).to(memory_format=last)
    split = torch.empty(200, 3, 32, 32, dtype=torch.uint8), torch.empty(200, dtype=torch.int64)
    if place == "cpu":
        split[0].random_(), split[1].random_(10)
    else:
        emulate(model)
        split = tuple(on_device(each) for each in split)
    return ImageClassification(model, split, split, prepare, {}, autocast("float32", torch.device(place)))

on_cpu = make_task("cpu")  # has values, so that it can be traced
plan_of_layers = attach(on_cpu.model, per_layer(on_cpu.model), 0.1, rates=RATES).trace(on_cpu.losses_of, range(6))

class Counted(TaskSums):
    def add(self, private, step, drawn):
        super().add(private, step, drawn)
        stack.close()
        rest = stack.enter_context(gpu.counted())
        rows.append({"microbatches": -(-len(drawn) // 32), "passed": passed, "rest": rest})
        return torch.zeros(())  # the emulated loss has no value

with gpu:
    with torch.device("meta"):
        task = make_task("cuda")
    model = task.model
    engine = attach(model, per_layer(model), 0.1, rates=RATES)
    engine.plan = plan_of_layers
    sizes = dict(dataset_size=200, expected_batch_size=64, steps=2, num_groups=len(engine.groups), quantile_budget=0.1)
    plan = make_plan(**sizes, delta=1e-5, noise_multiplier=1.0, accountant="rdp")
    private = PrivateStep(
        model=model, engine=engine, thresholds=make_thresholds(ClipConfig(quantile_budget=0.1), plan), plan=plan,
        noise=EmulatedNoise.from_seed(0), allocation="global", device=device, sums=Counted(task, 32),
        optimizer=make_optimizer(model.parameters(), OptimConfig()),
    )
    task.losses_of(range(1))  # uploads the normalisation constants once
    rows, stack = [], ExitStack()
    for _ in range(2):
        passed = stack.enter_context(gpu.counted())
        private.step()
        stack.close()
print(json.dumps(rows))
"""


def test_host_synchronises_only_for_the_counts(python) -> None:
    for row in json.loads(python(LOOP).splitlines()[-1]):
        assert row["passed"]["waits"] == {"clipping/thresholds_and_counts.py:ThresholdsAndCounts._on_host": 1}
        uploads = {
            "clipping/thresholds_and_counts.py:ThresholdsAndCounts.set_thresholds": 2,
            "training/task.py:to_device": row["microbatches"],
        }
        assert row["passed"]["uploads"] == uploads
        assert not row["rest"]["waits"]
        assert row["rest"]["uploads"] == {"privacy/philox_noise.py:add_": 1}
        assert row["rest"]["launches"] < 250, "noise of all parameters is drawn together"
