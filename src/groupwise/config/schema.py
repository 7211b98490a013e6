"""The schema of a run's configuration: the keys of `conf/`, and the types that the code behind `run.py` receives.

These are plain dataclasses, so this module is fast to import, and a run can be configured in Python without Hydra.
Every field is a key of the command line (``clip.target_quantile=0.7``). It declares its allowed words, or its range of
numbers. `groupwise.config.checks` checks combinations of keys.
"""

from dataclasses import dataclass, field
from typing import Any

from groupwise.rows import SCALES

POSITIVE, NOT_NEGATIVE, BELOW_ONE, INSIDE = "greater than zero", "zero or more", "in [0, 1)", "in (0, 1)"


def one_of(default: str, *choices: str) -> Any:
    """Return a field that takes one of these words. Error messages list them in this order."""
    return field(default=default, metadata={"choices": choices})


def number(default: float | None, within: str, most: float = 1e15, infinite: bool = False) -> Any:
    """Return a field for a number in one of the ranges above, and at most ``most``, beyond which libraries fail."""
    return field(default=default, metadata={"within": within, "most": most, "infinite": infinite})


@dataclass
class LoraConfig:
    """Low-rank adapters (`model.trains=lora`)."""

    rank: int = number(16, POSITIVE)
    alpha: float = number(32.0, POSITIVE)
    """The adapter's output is multiplied by alpha / rank."""
    dropout: float = number(0.0, BELOW_ONE)
    targets: list[str] = field(default_factory=list)
    """Layers that get an adapter, by the ends of their names, such as c_attn; empty: peft's choice for the model."""


@dataclass
class ModelConfig:
    """The network: a wide residual network from scratch, or a language model of the transformers library."""

    name: str = "wide_resnet"
    """Images: wide_resnet, scatter_cnn or lite0_head. Text: a label for tables, such as roberta_base."""
    source: str | None = None
    """Text: a folder that `save_pretrained` wrote, or a name on the Hugging Face hub."""
    fresh: bool = False
    """Text: random weights for the model that `architecture` and `shape`, or else `source`, describe."""
    weights: str | None = None
    """The folder of a finished run, or its model.pt, to start from, for any number of stages. Unless its data are
    public, its budget is added; if it was not private, this run is not private either (docs/privacy.md)."""
    architecture: str | None = None
    """Text: transformers' model_type, such as roberta or gpt2, for fresh weights."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Text: arguments of that type's configuration, such as {n_layer: 2}."""
    tokenizer: str | None = None
    """Text: a folder or a name on the hub; null uses `source`."""
    trains: str = one_of("all", "all", "attention", "bias", "lora")
    """Text: all | attention (self-attention and head) | bias (biases and head) | lora (adapters and head)."""
    pool: str = one_of("first", "first", "mean")
    """Classifiers: the head reads the first token, or the mean of all tokens."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    untie: bool = False
    """Text: give the head its own copy of a tied token embedding."""
    dropout: float | None = number(None, BELOW_ONE)
    """Text: of embeddings and residuals; null keeps the model's own."""
    attention_dropout: float | None = number(None, BELOW_ONE)
    attention: str = one_of("sdpa", "sdpa", "eager")
    frozen_dtype: str = one_of("float32", "float32", "bfloat16")
    """Text: dtype of the parameters that are not trained. Trained parameters are float32."""
    rematerialize: bool = False
    """Text: keep only each block's input, and recompute the block in the backward pass; for long texts."""
    depth: int = number(16, POSITIVE, most=10_000)
    """Number of layers, 6n + 4."""
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
    """Keep only this many training examples: the first of each class (text: a fixed random choice); null keeps all."""
    train_file: str | None = None
    """Text: another training file in the folder of the data set; null uses the usual name."""
    hub: str = "nyu-mll/glue"
    """GLUE: the data set on the hub, or a local copy of its folder, to read if there are no tsv files."""
    holdout: float | None = number(None, BELOW_ONE)
    """Hold out this share of the training set for validation, to tune settings (0.2 in the paper)."""
    public: bool = False
    """The data are public: `seed` determines batches, masks and noise, so that compared runs share them and a row can
    be reproduced (sweeps.reproduce). Not a private release."""
    max_length: int = number(256, POSITIVE)
    """Text: tokens of an example, end token included. Longer ones are truncated, and the record has their number."""


@dataclass
class ClipConfig:
    """One clipping mode: grouping x computation of norms x threshold policy."""

    name: str = "adaptive_layer"
    grouping: str = one_of("layer", "none", "flat", "layer", "block", "device", "custom")
    """The partition of the layers into K groups; device: one group for each pipeline stage."""
    norms: str = one_of("bookkeeping", "bookkeeping", "ghost")
    """bookkeeping (one backward pass) | ghost (two backward passes, less memory; flat grouping only)."""
    policy: str = one_of("adaptive", "fixed", "adaptive")
    """fixed | adaptive: thresholds follow a private quantile of the norms."""
    rule: str = one_of("min", "min", "automatic")
    """min: min(1, C/norm) | automatic: C/(norm + gamma)."""
    gamma: float = number(0.01, NOT_NEGATIVE)
    """Stability constant of the automatic rule."""
    threshold: float = number(1.0, POSITIVE)
    """C, the norm of the whole clipped gradient; each of K groups gets C/sqrt(K)."""
    initial_threshold: float | None = number(None, POSITIVE)
    """Adaptive: the initial value of each C_k; null: C/sqrt(K)."""
    target_quantile: float = number(0.6, INSIDE)
    """q: the share of examples whose norm should be below the threshold."""
    quantile_learning_rate: float = number(0.3, POSITIVE)
    """The step of the geometric threshold update (eta in the paper)."""
    quantile_budget: float = number(0.01, INSIDE)
    """r: the share of the privacy budget for the counts."""
    rescale: bool = True
    """Adaptive: rescale the thresholds so that sqrt(sum C_k^2) = threshold."""
    minimum: float = number(1e-8, POSITIVE)
    """Lower bound of adaptive thresholds."""
    maximum: float = number(1e8, POSITIVE)
    """Upper bound of adaptive thresholds."""
    formula: str = one_of("auto", "auto", "gram", "materialize")
    """How norms are computed for layers with both methods; equal up to rounding."""
    mapping: dict[str, str] = field(default_factory=dict)
    """grouping=custom: glob of layer names -> group name; the first match is used."""


@dataclass
class NoiseConfig:
    """How the groups share the noise (gamma_k)."""

    allocation: str = one_of("global", "global", "equal_budget", "weighted")
    """global (gamma_k = 1) | equal_budget (gamma_k = C_k) | weighted (gamma_k = C_k / sqrt(d_k))."""
    secure: bool = False
    """Draw noise and batches from a cipher, and add the noise on a lattice; several times slower (docs/privacy.md)."""


@dataclass
class PrivacyConfig:
    """The budget: epsilon, or else noise_multiplier. The other one is computed."""

    epsilon: float | None = number(8.0, POSITIVE, infinite=True)
    """inf means no noise and no guarantee."""
    delta: float | None = number(1e-5, INSIDE)
    """null: 1/N^1.1, for N training examples."""
    noise_multiplier: float | None = number(None, NOT_NEGATIVE)
    sampling: str = one_of("poisson", "poisson", "shuffle")
    """shuffle reproduces published runs; its epsilon is not a guarantee."""
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
    """linear and cosine decay to zero at the last step."""
    warmup: float = number(0.0, BELOW_ONE)
    """Fraction of the steps in which the learning rate rises linearly."""


@dataclass
class TrainConfig:
    """The training loop."""

    batch_size: int | None = number(4096, POSITIVE)
    """B: the expected size of a logical batch, which makes one update. null: computed from sample_rate."""
    sample_rate: float | None = number(None, POSITIVE, most=1)
    """rho: the probability that an example is drawn in a step, B = rho N; instead of batch_size."""
    epochs: float = number(300.0, POSITIVE)
    steps: int | None = number(None, POSITIVE)
    """T; null: round(epochs * N / B)."""
    microbatch: int | None = number(None, POSITIVE)
    """Examples in memory at once; null: automatic. The update depends on it only by rounding and by dropout masks."""
    token_loss: str = one_of("mean", "mean", "sum")
    """Text: mean or sum of an example's token losses."""
    precision: str = one_of("float32", "float32", "tf32", "bfloat16")
    """tf32: in the forward pass, on a GPU; bfloat16: by autocast. Norms, sums and noise are always float32."""
    deterministic: bool = False
    """On a GPU: use only deterministic algorithms, which are slower. CPU algorithms are always deterministic."""
    compile: bool = False
    cuda_graph: bool = False
    """On a GPU: capture a microbatch as a CUDA graph, once for each shape; for small microbatches."""
    device: str = one_of("auto", "auto", "cpu", "cuda")
    checkpoint_every: float = number(60.0, NOT_NEGATIVE)
    """Seconds between checkpoints; 0: after every step. It does not affect the result."""
    keep: list[float] = field(default_factory=list)
    """Epochs after which to save the weights, as weights-<step>.pt in the run's folder; 0: before the first step."""
    channels_last: bool = True
    """Memory layout of convolutions."""
    matmul: str = one_of("auto", "auto", "torch", "onednn")
    """On a CPU: float32 matrix products of clipped layers by torch's default library or by oneDNN; auto: the faster."""
    threads: int | None = number(None, POSITIVE, most=1_000)
    """CPU threads of torch; null: torch's default. One is fastest for small networks."""


@dataclass
class GenerateConfig:
    """Beam search on the inputs of the validation or test set, at the end of a run (E2E, DART, SAMSum)."""

    beams: int = number(4, POSITIVE)
    max_new_tokens: int = number(100, POSITIVE)
    length_penalty: float = 1.0
    batch_size: int = number(16, POSITIVE)
    limit: int | None = number(None, NOT_NEGATIVE)
    """Generate only for this many inputs; 0: none; null: all."""


@dataclass
class EvalConfig:
    """Evaluation on the training and validation sets, and on the test set if there is one."""

    every: float | None = number(None, POSITIVE)
    """Epochs between evaluations. There is always one at the end; null: only that one."""
    curve: bool = False
    """Make every evaluation as complete as the last one, with the test set and generated texts."""
    train_limit: int | None = number(None, POSITIVE)
    """Evaluate on this many training examples only; null: all."""
    batch_size: int = number(1000, POSITIVE)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    shots: int | None = number(None, NOT_NEGATIVE)
    """Do not train, but generate from a prompt with this many training examples before the input; null: train."""
    prompt_set: int = number(0, NOT_NEGATIVE, most=2)
    """Number of the set of examples in the prompt (the paper averages over three sets)."""


@dataclass
class PipelineConfig:
    """The model split into stages of consecutive blocks, each with its own process and device (Algorithm 2)."""

    stages: int = number(1, POSITIVE, most=1_000)
    """Number of stages, which is K for per-device clipping; 1: no pipeline."""
    blocks: list[int] = field(default_factory=list)
    """Number of blocks in each stage; empty: stages with about equal numbers of parameters."""
    rematerialize: bool = False
    """Keep only each block's input, and recompute the block in the backward pass."""
    timeout: float = number(600.0, POSITIVE)
    """Seconds that a process waits for another one before it raises an error."""


@dataclass
class ParallelConfig:
    """Replicas of the model or of its pipeline. Each gets a share of every batch."""

    ranks: int = number(1, POSITIVE, most=10_000)
    """Number of processes, for each pipeline stage; 1: no replicas."""
    kind: str = one_of("ddp", "ddp", "fsdp")
    """ddp: each process has the whole model | fsdp: the parameters are sharded (FSDP2)."""


@dataclass
class TrackerConfig:
    """A tracker for metrics. The run's own files are always written."""

    name: str = one_of("files", "files", "wandb", "tensorboard", "mlflow")
    project: str = "groupwise"
    mode: str = one_of("offline", "offline", "online", "disabled")
    """wandb only."""


@dataclass
class PathsConfig:
    """Folders, relative to the current folder."""

    data: str = "data"
    results: str = "results"


@dataclass
class DebugConfig:
    """For tests only."""

    noise_seed: int | None = number(None, NOT_NEGATIVE)
    """Seed of the noise. The noise is then predictable, so the run is marked "not private"."""


@dataclass
class RunConfig:
    """The configuration of one run. Two equal ones on the same machine are the same experiment."""

    task: str = "cifar"
    own_task: dict[str, Any] = field(default_factory=dict)
    """Your own task: {_target_: module.function}, and the function's arguments other than (config, device)."""
    scale: str = one_of("paper", *SCALES)
    """Written into every result row."""
    seed: int = number(0, NOT_NEGATIVE)
    """Seed of the initial weights. With noise, batches and noise come from a secret key instead."""
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
    """Delete this configuration's earlier run, finished or not, and start a new one."""
    export: str | None = None
    """Text: also write the trained model to this folder for transformers, with its tokenizer, recipe and hash."""
    explain: bool = False
    """Print how each layer's norms are computed, and why. Nothing is trained or written."""


@dataclass
class SweepConfig:
    """The cells of a table or figure, as in a file of `sweeps/`; see `groupwise.sweeps.cells`."""

    grids: list[dict[str, Any]] = field(default_factory=list)
    scales: dict[str, dict[str, Any] | None] = field(default_factory=dict)


@dataclass
class Command(RunConfig):
    """The command line: a run, or a sweep of runs."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """``+sweep=NAME`` chooses a file of `sweeps/`."""
    cell: str | None = None
    """Set by sweeps for their jobs: the cell to run, by the first digits of its hash."""
