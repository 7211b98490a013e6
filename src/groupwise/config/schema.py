"""The schema of a run's configuration: the keys of `conf/`, and the types that the code behind `run.py` receives.

Plain dataclasses, so importing this module costs nothing, and a run can be described in Python without Hydra. Every
field is a key of the command line (``clip.target_quantile=0.7``) and declares its values: some words, or a range of
numbers. Checks of several keys together are in `groupwise.config.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from groupwise.rows import SCALES

POSITIVE, NOT_NEGATIVE, BELOW_ONE, INSIDE = "greater than zero", "zero or more", "in [0, 1)", "in (0, 1)"


def one_of(default: str, *choices: str) -> Any:
    """A field that takes one of these words, in the order in which messages list them."""
    return field(default=default, metadata={"choices": choices})


def number(default: float | None, within: str, most: float | None = None, infinite: bool = False) -> Any:
    """A field that takes a number within one of the ranges above, at most ``most`` if libraries fail beyond that."""
    return field(default=default, metadata={"within": within, "most": most, "infinite": infinite})


@dataclass
class LoraConfig:
    """Low-rank adapters (`model.trains=lora`)."""

    rank: int = number(16, POSITIVE)
    alpha: float = number(32.0, POSITIVE)
    """The adapter's output is multiplied by alpha / rank."""
    dropout: float = number(0.0, BELOW_ONE)
    targets: list[str] = field(default_factory=list)
    """Ends of the names of layers that get an adapter, such as c_attn; empty takes peft's choice for the model."""


@dataclass
class ModelConfig:
    """The network: a wide residual network from scratch, or a language model of the transformers library."""

    name: str = "wide_resnet"
    """wide_resnet, scatter_cnn or lite0_head for images; for text a label, such as roberta_base, which tables show."""
    source: str | None = None
    """Text: a folder that `save_pretrained` wrote, or a name on the Hugging Face hub."""
    fresh: bool = False
    """Text: random weights, in the shape of `architecture` and `shape`, or else of `source`."""
    weights: str | None = None
    """A finished run's folder, or its model.pt, to start from; for any number of stages. On the same data its budget is
    added, and a run without privacy makes this one not private (docs/privacy.md)."""
    architecture: str | None = None
    """Text: transformers' model_type, such as roberta or gpt2, for fresh weights."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Text: arguments of that type's configuration, such as {n_layer: 2}."""
    tokenizer: str | None = None
    """Text: a folder or a name on the hub; null takes `source`."""
    trains: str = one_of("all", "all", "attention", "bias", "lora")
    """Text: all | attention (self-attention and head) | bias (biases and head) | lora (adapters
    and head)."""
    pool: str = one_of("first", "first", "mean")
    """Classifiers: first | mean, the token or the mean of all tokens that the head reads."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    untie: bool = False
    """Text: give the head its own copy of a tied token embedding."""
    dropout: float | None = number(None, BELOW_ONE)
    """Text: of embeddings and residuals; null keeps the model's own."""
    attention_dropout: float | None = number(None, BELOW_ONE)
    attention: str = one_of("sdpa", "sdpa", "eager")
    frozen_dtype: str = one_of("float32", "float32", "bfloat16")
    """Text: of the parameters that do not train; those that train are float32."""
    rematerialize: bool = False
    """Text: keep only each block's input, and compute the block again in the backward pass; for long texts."""
    depth: int = number(16, POSITIVE, most=10_000)
    """Layers, 6n + 4."""
    width: int = number(4, POSITIVE, most=1_000)
    """Channels, as a multiple of 16, 32, 64."""
    norm_groups: int = number(16, POSITIVE)
    weight_standardization: bool = True


@dataclass
class DataConfig:
    """The examples."""

    name: str = "cifar10"
    """Images: cifar10 | digits (embedded, no network). Text: files (or the hub, for GLUE) | synthetic (generated, no
    network)."""
    image_size: int | None = number(None, POSITIVE)
    """Side in pixels after average pooling; null keeps the images as they are."""
    train_limit: int | None = number(None, POSITIVE)
    """Keep only this many training examples, the first of each class (text: a fixed random choice); null keeps all."""
    train_file: str | None = None
    """Text: another training file, in the folder of the data set; null takes the usual name."""
    hub: str = "nyu-mll/glue"
    """GLUE: the data set on the hub (or a local copy of its folder) that is read if there are no tsv files."""
    holdout: float | None = number(None, BELOW_ONE)
    """Set this share of the training set aside and validate on it, for tuning (0.2 in the paper)."""
    public: bool = False
    """The data are public: batches, masks and noise follow from `seed`, so that compared runs share them and a row
    can be reproduced (sweeps.reproduce). Not a private release."""
    max_length: int = number(256, POSITIVE)
    """Text: tokens of an example, its end included; longer ones are cut, and the record says how many."""


@dataclass
class ClipConfig:
    """One clipping mode: grouping x computation of norms x threshold policy."""

    name: str = "adaptive_layer"
    grouping: str = one_of("layer", "none", "flat", "layer", "block", "device", "custom")
    """The partition of the layers into K groups; device: one for each stage of a pipeline, flat on a single one."""
    norms: str = one_of("bookkeeping", "bookkeeping", "ghost")
    """bookkeeping (one backward) | ghost (two backwards, nothing kept; one flat group only)."""
    policy: str = one_of("adaptive", "fixed", "adaptive")
    """fixed | adaptive: they follow a private quantile."""
    rule: str = one_of("min", "min", "automatic")
    """min: min(1, C/norm) | automatic: C/(norm + gamma)."""
    gamma: float = number(0.01, NOT_NEGATIVE)
    """Stability constant of the automatic rule."""
    threshold: float = number(1.0, POSITIVE)
    """C, the norm of the whole clipped gradient; each of K groups gets C/sqrt(K)."""
    initial_threshold: float | None = number(None, POSITIVE)
    """Adaptive: where each C_k starts; null starts at C/sqrt(K)."""
    target_quantile: float = number(0.6, INSIDE)
    """q: the share of examples that a threshold should leave unclipped."""
    quantile_learning_rate: float = number(0.3, POSITIVE)
    """The step of the geometric threshold update (eta in the paper)."""
    quantile_budget: float = number(0.01, INSIDE)
    """r: the share of the privacy budget that pays for the counts."""
    rescale: bool = True
    """Adaptive: rescale the thresholds so that sqrt(sum C_k^2) = threshold."""
    minimum: float = number(1e-8, POSITIVE)
    """No adaptive threshold falls below this."""
    maximum: float = number(1e8, POSITIVE)
    """No adaptive threshold rises above this."""
    formula: str = one_of("auto", "auto", "gram", "materialize")
    """How norms are computed if a layer has the choice; equal up to rounding."""
    mapping: dict[str, str] = field(default_factory=dict)
    """grouping=custom: glob of layer names -> group name; the first match counts."""


@dataclass
class NoiseConfig:
    """How the groups share the noise (gamma_k)."""

    allocation: str = one_of("global", "global", "equal_budget", "weighted")
    """global (gamma_k = 1) | equal_budget (gamma_k = C_k) | weighted (gamma_k = C_k / sqrt(d_k))."""
    secure: bool = False
    """Draw noise and batches from a cipher, and add the noise on a lattice: several times slower; docs/privacy.md."""


@dataclass
class PrivacyConfig:
    """The budget: either epsilon decides the noise, or noise_multiplier is given and epsilon follows."""

    epsilon: float | None = number(8.0, POSITIVE, infinite=True)
    """inf means no noise and no guarantee."""
    delta: float | None = number(1e-5, INSIDE)
    """null: 1/N^1.1, N the number of training examples."""
    noise_multiplier: float | None = number(None, NOT_NEGATIVE)
    sampling: str = one_of("poisson", "poisson", "shuffle")
    """shuffle is as published: its epsilon is not a guarantee."""
    accountant: str = one_of("prv", "prv", "pld", "rdp")


@dataclass
class OptimConfig:
    """An optimiser and its learning-rate schedule, both from torch."""

    name: str = one_of("sgd", "sgd", "adam", "adamw")
    learning_rate: float = number(1.0, POSITIVE)
    momentum: float = number(0.0, BELOW_ONE)
    """sgd only."""
    weight_decay: float = number(0.0, NOT_NEGATIVE)
    beta1: float = number(0.9, BELOW_ONE)
    """adam and adamw only, as beta2 and eps."""
    beta2: float = number(0.999, BELOW_ONE)
    eps: float = number(1e-8, POSITIVE)
    schedule: str = one_of("constant", "constant", "linear", "cosine")
    """linear and cosine go to zero at the last step."""
    warmup: float = number(0.0, BELOW_ONE)
    """Fraction of the steps that the learning rate takes to rise linearly."""


@dataclass
class TrainConfig:
    """The loop."""

    batch_size: int | None = number(4096, POSITIVE)
    """B: the expected logical batch size; one noisy update each. null derives it from sample_rate."""
    sample_rate: float | None = number(None, POSITIVE, most=1)
    """rho: the probability that an example is drawn at a step, B = rho N; instead of batch_size."""
    epochs: float = number(300.0, POSITIVE)
    steps: int | None = number(None, POSITIVE)
    """T: null means round(epochs * N / B)."""
    microbatch: int | None = number(None, POSITIVE)
    """Examples in memory at once; null chooses. The update depends on it by rounding, and by masks if there are any."""
    token_loss: str = one_of("mean", "mean", "sum")
    """Text: mean or sum of an example's token losses; losses are summed over examples."""
    precision: str = one_of("float32", "float32", "tf32", "bfloat16")
    """tf32: in the forward pass, on a GPU; bfloat16: by autocast. Norms, sums and noise are float32 in all."""
    deterministic: bool = False
    """On a GPU: only deterministic algorithms, which are slower. On a CPU they always are."""
    compile: bool = False
    cuda_graph: bool = False
    """On a GPU: record a microbatch as a CUDA graph, once for each shape; for small microbatches."""
    device: str = one_of("auto", "auto", "cpu", "cuda")
    checkpoint_every: float = number(60.0, NOT_NEGATIVE)
    """Seconds between checkpoints (0: after every step); when one is written never changes the result."""
    keep: list[float] = field(default_factory=list)
    """Epochs at which the weights are kept, as weights-<step>.pt in the run's folder; 0 is before the first step."""
    channels_last: bool = True
    """Memory layout of convolutions."""
    matmul: str = one_of("auto", "auto", "torch", "onednn")
    """On a CPU: float32 products of clipped layers by torch's own library or by oneDNN; auto takes the faster."""
    threads: int | None = number(None, POSITIVE, most=1_000)
    """CPU threads of torch; null leaves its default. One is fastest for small networks."""


@dataclass
class GenerateConfig:
    """Beam search on the inputs of the validation or test set, at the end of a run (E2E, DART, SAMSum)."""

    beams: int = number(4, POSITIVE)
    max_new_tokens: int = number(100, POSITIVE)
    length_penalty: float = 1.0
    batch_size: int = number(16, POSITIVE)
    limit: int | None = number(None, NOT_NEGATIVE)
    """Generate for the first inputs only; 0 for none; null for all."""


@dataclass
class EvalConfig:
    """Evaluation on the training and the validation set, and on the test set where there is one."""

    every: float | None = number(None, POSITIVE)
    """Epochs between evaluations; null evaluates only at the end, which always happens."""
    curve: bool = False
    """Make every evaluation as complete as the last one: test set and generated texts too."""
    train_limit: int | None = number(None, POSITIVE)
    """Evaluate on this many training examples only; null takes all."""
    batch_size: int = number(1000, POSITIVE)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    shots: int | None = number(None, NOT_NEGATIVE)
    """Train nothing, and generate from a prompt with this many training examples before the input; null trains."""
    prompt_set: int = number(0, NOT_NEGATIVE, most=2)
    """The set of examples in the prompt (the paper averages over three)."""


@dataclass
class PipelineConfig:
    """The model split into stages of consecutive blocks, a process and a device each (Algorithm 2)."""

    stages: int = number(1, POSITIVE, most=1_000)
    """K of per-device clipping; 1 is no pipeline."""
    blocks: list[int] = field(default_factory=list)
    """The number of blocks of each stage; empty makes their parameters even."""
    rematerialize: bool = False
    """Keep only each block's input, and compute the block again in the backward pass."""
    timeout: float = number(600.0, POSITIVE)
    """Seconds that a process waits for another one before it fails."""


@dataclass
class ParallelConfig:
    """Replicas of the model, or of its pipeline, each with a share of every batch."""

    ranks: int = number(1, POSITIVE, most=10_000)
    """Processes, for each stage of a pipeline; 1 is no replicas."""
    kind: str = one_of("ddp", "ddp", "fsdp")
    """ddp: a whole copy each | fsdp: parameters in shards (FSDP2)."""


@dataclass
class TrackerConfig:
    """A tracker for metrics, besides the run's own files, which are always written."""

    name: str = one_of("files", "files", "wandb", "tensorboard", "mlflow")
    project: str = "groupwise"
    mode: str = one_of("offline", "offline", "online", "disabled")
    """wandb only."""


@dataclass
class PathsConfig:
    """Folders, relative to where the command is given."""

    data: str = "data"
    results: str = "results"


@dataclass
class DebugConfig:
    """For tests only."""

    noise_seed: int | None = number(None, NOT_NEGATIVE)
    """Seeded noise can be repeated, so the run is marked "not private"."""


@dataclass
class RunConfig:
    """One run, complete: two equal RunConfigs on the same machine are the same experiment."""

    task: str = "cifar"
    own_task: dict[str, Any] = field(default_factory=dict)
    """A task of your own: {_target_: module.function}, and the function's arguments besides (config, device)."""
    scale: str = one_of("paper", *SCALES)
    """Written into every result row."""
    seed: int = number(0, NOT_NEGATIVE)
    """Initial weights; never the noise nor, where there is noise, the batches: those come from a secret key."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    resume: str | None = None
    """The folder of an unfinished run to resume."""
    overwrite: bool = False
    """Delete this configuration's earlier run, finished or not, and start afresh."""
    export: str | None = None
    """Text: also write the trained model as a transformers folder, with its tokenizer, recipe and hash."""
    explain: bool = False
    """Print how each layer's norms are computed, and why; then stop, with nothing trained or written."""


@dataclass
class SweepConfig:
    """The cells of a table or figure, as a file of `sweeps/` has them; see `groupwise.sweeps.cells`."""

    grids: list[dict[str, Any]] = field(default_factory=list)
    scales: dict[str, Any] = field(default_factory=dict)


@dataclass
class Command(RunConfig):
    """The command line: a run, or a sweep of runs."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """``+sweep=NAME`` chooses a file of `sweeps/`."""
    cell: str | None = None
    """Of a sweep's own jobs: the cell to run, by the first digits of its hash."""
