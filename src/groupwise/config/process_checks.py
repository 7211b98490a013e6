"""Refuses what a run in several processes may not ask for, in one sentence each."""

from collections.abc import Iterator

from groupwise.config.schema import RunConfig

PIPELINES = ("samsum", "e2e", "dart", "cifar")
"""Tasks whose model can be cut into stages."""
IMAGE_MODELS = ("wide_resnet", "scatter_cnn")


def pipeline(config: RunConfig) -> Iterator[str]:
    """What no pipeline can do, and what would need the thresholds or the norms of other stages (Algorithm 2)."""
    clip, stages, blocks = config.clip, config.pipeline.stages, config.pipeline.blocks
    if blocks and (len(blocks) != stages or min(blocks) < 1):
        yield f"pipeline.blocks={blocks} must give each of the {stages} stages (pipeline.stages) one block or more."
    if stages == 1:
        return
    several = f"pipeline.stages={stages}"
    if config.task not in PIPELINES:
        yield f"{several} is not for task={config.task}: choose one of {', '.join(PIPELINES)}, or pipeline.stages=1."
    if clip.norms == "ghost":
        yield f"clip.norms=ghost is not for {several}: clip=flat does the same there, in two passes of the pipeline."
    if clip.grouping == "custom":
        yield f"clip.grouping=custom cannot tell the stages of {several} apart: use device, layer, block or flat."
    if clip.grouping in ("device", "layer", "block"):
        if config.noise.allocation != "equal_budget":
            yield (
                f"noise.allocation={config.noise.allocation} needs the thresholds of all stages before any can add its "
                f"noise: use noise=equal_budget with {several}."
            )
        if clip.policy == "adaptive" and clip.rescale:
            yield f"clip.rescale=true needs the thresholds of all stages: use clip.rescale=false with {several}."
    if config.model.rematerialize:
        yield f"model.rematerialize=true is not for {several}: give pipeline.rematerialize=true."
    if config.train.compile or config.train.ema:
        what = "train.compile=true" if config.train.compile else f"train.ema={config.train.ema}"
        yield f"{what} is not for {several}: leave it out."
    if config.eval.shots is not None:
        yield f"eval.shots is not for {several}: nothing trains, so one process is enough; give pipeline.stages=1."
    if config.explain:
        yield f"explain=true shows one process: give pipeline.stages=1 instead of {stages}."
    if config.export is not None:
        yield f"export is not for {several}: take model.pt from the run's folder."


def parallel(config: RunConfig) -> Iterator[str]:
    """What processes beside those of a pipeline cannot do, and what sharded parameters cannot clip."""
    clip, ranks, sharded = config.clip, config.parallel.ranks, config.parallel.kind == "fsdp"
    if sharded and config.pipeline.stages > 1:
        yield "parallel.kind=fsdp is not for pipelines, whose stages are shards already: use parallel.kind=ddp."
    if ranks == 1:
        return
    if config.eval.shots is not None or config.explain:
        what = "explain=true" if config.explain else "eval.shots"
        yield f"{what} trains nothing, so one process is enough: give parallel.ranks=1."
    if sharded and (config.train.compile or config.export is not None):
        what = "train.compile=true" if config.train.compile else "export"
        yield f"{what} is not for parallel.kind=fsdp: leave it out (model.pt is in the run's folder), or use ddp."
    if sharded and config.train.ema:
        yield f"train.ema={config.train.ema} is not for parallel.kind=fsdp: leave it out, or use ddp."
    if sharded and config.task.startswith("pretrain"):
        yield f"task={config.task} runs parts of its model alone, which shards cannot: use parallel.kind=ddp."
    if sharded and clip.grouping not in ("none", "layer") and clip.norms != "ghost":
        yield (
            "parallel.kind=fsdp shards parameters layer by layer, "
            f"and clip.grouping={clip.grouping} needs all at once: "
            "use clip=adaptive_layer, fixed_layer or ghost, or parallel.kind=ddp."
        )


def tensor(config: RunConfig) -> Iterator[str]:
    """What cannot run on parts of tensors, and what would need the thresholds of other parts."""
    clip, kind = config.clip, "parallel.kind=tensor"
    if config.parallel.kind != "tensor" or config.parallel.ranks == 1:
        return
    if config.model.name in IMAGE_MODELS or config.task.startswith("pretrain"):
        yield f"{kind} cuts causal language models and classifiers of text: use parallel.kind=ddp."
    if config.model.trains == "lora":
        yield f"{kind} cuts no adapters: use parallel.kind=ddp with model.trains=lora, or model.trains=all."
    if config.train.compile or config.train.ema:
        what = "train.compile=true" if config.train.compile else f"train.ema={config.train.ema}"
        yield f"{what} is not for {kind}: leave it out, or use parallel.kind=ddp."
    if clip.grouping == "device":
        if config.noise.allocation != "equal_budget":
            yield (
                f"noise.allocation={config.noise.allocation} needs the thresholds of all parts before any can add its "
                f"noise: use noise=equal_budget with clip.grouping=device and {kind}."
            )
        if clip.policy == "adaptive" and clip.rescale:
            yield f"clip.rescale=true needs the thresholds of all parts: use clip.rescale=false with {kind}."
