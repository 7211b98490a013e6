"""One training step of each method: ours here, those of other libraries in `peers` and `research_peers`.

A step clears the gradients, runs forward and backward and leaves the clipped sums (plain sums for `none`) in `.grad`.
Noise is separate, as it is added once per logical batch. Parameters are not updated.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks import peers, research_peers
from benchmarks.job import Job
from benchmarks.workloads import Workload, build
from groupwise.clipping import ClipPlan, Rates, attach, flat, per_block, per_layer
from groupwise.clipping.partition import Partition
from groupwise.clipping.rules.base import find_rule
from groupwise.clipping.rules.linear import LinearRule
from groupwise.privacy import AdaptiveThresholds, FixedThresholds, NoiseSource, release_gradients
from groupwise.training.graphs import WARM_UP, CudaRecorder, recorder_of

THRESHOLD = 0.1  # C of flat clipping; K groups get C/√K each
NOISE_MULTIPLIER = 1.0
COUNT_NOISE_MULTIPLIER = 10.0
TARGET_QUANTILE = 0.5
QUANTILE_LEARNING_RATE = 0.3  # the paper's η


class Method(Protocol):
    """A method to train a workload."""

    def step(self) -> None:
        """Clear gradients, run forward and backward, leave clipped sums in `.grad`."""

    def noise(self) -> None:
        """Add noise to the sums of the last `step`, at most once per step."""

    def clear(self) -> None:
        """Free the memory of gradients."""


class NonPrivate:
    """Plain training: forward and backward pass."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def step(self) -> None:
        """Leave the sums of gradients in `.grad`; `Ours` clips them."""
        self.clear()
        self.begin()
        self.work()
        self.end()

    def begin(self) -> None:
        """The part of a step on the host before `work`."""

    def work(self) -> None:
        """The part of a step on the device: forward and backward pass, always in the same memory."""
        self._workload.loss().sum().backward()

    def end(self, repeated: bool = False) -> None:
        """The part of a step on the host after `work`; `repeated` if a CUDA graph replayed the work."""

    def noise(self) -> None:
        """Plain training adds no noise."""

    def clear(self) -> None:
        """Clear the sums."""
        for parameter in self._workload.trainable:
            parameter.grad = None


class SameProducts(NonPrivate):
    """Plain training whose linear layers use `groupwise.clipping.matmul`, as in `Ours`."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        for module in workload.model.modules():
            kind = find_rule(module)
            if kind is not None and issubclass(kind, LinearRule):
                module.forward = partial(_LinearFunction.apply, kind(module), module.weight, module.bias)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: LinearRule, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        ctx.rule = rule
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return rule.forward(x, weight, bias)[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        _, weight_wanted, bias_wanted, input_wanted = ctx.needs_input_grad
        gx = ctx.rule.input_gradient(ctx.saved_tensors, g) if input_wanted else None
        weight = bias = None
        if weight_wanted:
            weight, bias = ctx.rule.weighted_sum(ctx.saved_tensors, g, None, (True, bias_wanted))
        return None, weight, bias, gx


class Ours(NonPrivate):
    """Group-wise clipping by `groupwise.clipping`, thresholds and noise by `groupwise.privacy`."""

    def __init__(
        self,
        workload: Workload,
        partition: Callable[..., Partition],
        *,
        adaptive: bool = False,
        norms: str = "bookkeeping",
        rates: Rates | None = None,
        plan: ClipPlan | None = None,
        noise: NoiseSource | None = None,
    ) -> None:
        super().__init__(workload)
        groups = partition(workload.model)
        start = [THRESHOLD / math.sqrt(len(groups))] * len(groups)
        self._thresholds: AdaptiveThresholds | FixedThresholds = FixedThresholds(start)
        if adaptive:
            self._thresholds = AdaptiveThresholds(
                start,
                target_quantile=TARGET_QUANTILE,
                learning_rate=QUANTILE_LEARNING_RATE,
                count_noise_multiplier=COUNT_NOISE_MULTIPLIER,
                expected_batch_size=workload.batch,
            )
        self._adaptive = adaptive
        self._engine = attach(workload.model, groups, start, norms=norms, rates=rates)  # type: ignore[arg-type]
        if plan is not None:
            self._engine.plan = plan
        elif workload.batch > 1:  # a batch of one example needs no trace
            self._engine.trace(workload.losses, range(workload.batch))
        self._engine.masks_rows = False  # as in a run
        secret = noise or NoiseSource(bytes(32)).settled(workload.trainable[0].device)
        self._noise = secret
        self._steps = 0

    def begin(self) -> None:
        """Set adaptive thresholds before each step, as in a run."""
        self._engine.reset()
        if self._adaptive:
            self._engine.set_thresholds(self._thresholds.clip_thresholds, self._thresholds.count_thresholds)

    def work(self) -> None:
        """Compute the clipped sums."""
        with self._engine.forward(self._workload.batch):
            losses = self._workload.loss()
        self._engine.backward(losses)

    def end(self, repeated: bool = False) -> None:
        """Update adaptive thresholds by the counts after each step."""
        if repeated:
            self._engine.repeated(self._workload.batch)
        if self._adaptive:
            self._thresholds.update(self._engine.counts, self._workload.batch, self._noise, self._steps)
        self._steps += 1

    def noise(self) -> None:
        """Add N(0, std_k²) in place, then divide by B."""
        release_gradients(
            self._engine.sensitivity("add_remove"),
            allocation="global",
            noise_multiplier=NOISE_MULTIPLIER,
            expected_batch_size=self._workload.batch,
            noise=self._noise,
            step=self._steps,
        )


class Recorded:
    """A method whose work is a CUDA graph, recorded here after warm-up steps, as with `train.cuda_graph=true`."""

    def __init__(self, method: NonPrivate, workload: Workload) -> None:
        self._method, self._workload, launches = method, workload, list[Callable[[], None]]()
        self._recorder: CudaRecorder = recorder_of(workload.trainable[0].device)
        for _ in range(WARM_UP):
            self._run(method.work)
        self._run(lambda: launches.append(self._recorder.record(method.work)))
        self._launch = launches[0]

    def step(self) -> None:
        """Compute the same sums, in gradients that keep their memory."""
        self._run(self._launch, repeated=True)

    def _run(self, work: Callable[[], None], repeated: bool = False) -> None:
        with self._recorder.running():
            for parameter in self._workload.trainable:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            self._method.begin()
            work()
            self._method.end(repeated)

    def noise(self) -> None:
        """Add noise as without a graph."""
        self._method.noise()

    def clear(self) -> None:
        """Do nothing, as the graph writes to the memory of the gradients."""


def _peer(kind: Callable[..., Method], **options: Any) -> Callable[[Workload], Method]:
    return lambda workload: kind(workload, THRESHOLD, NOISE_MULTIPLIER, **options)


RECORDED = {"none_graph": "none", "flat_graph": "flat", "adaptive_layer_graph": "adaptive_layer"}
"""Methods that need a GPU, and the method that each records as a CUDA graph."""
METHODS: dict[str, Callable[[Workload], Method]] = {
    "none": NonPrivate,
    "none_matmul": SameProducts,
    "none_again": NonPrivate,  # its ratio to `none` shows the timing noise
    "flat": lambda workload: Ours(workload, flat),
    "ghost": lambda workload: Ours(workload, flat, norms="ghost"),
    "fixed_layer": lambda workload: Ours(workload, per_layer),
    "adaptive_layer": lambda workload: Ours(workload, per_layer, adaptive=True),
    "block": lambda workload: Ours(workload, per_block, adaptive=True),
    "opacus_hooks": _peer(peers.Materialized),
    "opacus_functorch": _peer(peers.Materialized, force_functorch=True),
    "opacus_ghost": _peer(peers.Ghost),
    "opacus_per_layer": _peer(peers.Materialized, each_parameter=True),
    "fastdp_layer": _peer(research_peers.FastDP, style="layer-wise"),
    "fastdp_flat": _peer(research_peers.FastDP, style="all-layer"),
    "private_transformers": _peer(research_peers.PrivateTransformers),
}


SUMS_OF = {
    **dict.fromkeys(("opacus_hooks", "opacus_functorch", "opacus_ghost"), "flat"),
    **dict.fromkeys(("fastdp_flat", "private_transformers"), "flat"),
    "fastdp_layer": "fixed_layer",
}
"""Methods of other libraries, and our method that clips the same groups to the same thresholds."""


def is_peer(method: str) -> bool:
    """Whether a method belongs to another library."""
    return peers.is_peer(method) or research_peers.package_of(method) is not None


def formats(method: str, channels_last: bool) -> tuple[str, ...]:
    """The memory formats in which to measure a method: none and peers in both, ours in channels_last."""
    if not channels_last:
        return ("contiguous",)
    return ("contiguous", "channels_last") if method == "none" or is_peer(method) else ("channels_last",)


def make(name: str, workload: Workload) -> Method:
    """Prepare the workload's model for a method; each method needs its own model."""
    if name in RECORDED:
        method = METHODS[RECORDED[name]](workload)
        assert isinstance(method, NonPrivate)
        return Recorded(method, workload)
    return METHODS[name](workload)


def prepare(job: Job) -> tuple[Workload, Method]:
    """Build the workload and the method of a job."""
    workload = build(
        job.workload,
        batch=job.batch,
        layers=job.layers,
        tokens=job.tokens,
        tiny=job.tiny,
        device=job.device,
        dtype=job.dtype,
        channels_last=job.memory_format == "channels_last",
    )
    return workload, make(job.method, workload)
