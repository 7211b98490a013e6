"""Types a run: what `conf/` may say, and what every function past `run.py` receives.

Plain dataclasses: importing this module costs nothing, and a run can be described in Python without Hydra.
Every field is a key of the command line (``clip.target_quantile=0.7``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoraConfig:
    """Low-rank adapters (`model.trains=lora`)."""

    rank: int = 16
    alpha: float = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    dropout: float = 0.0
    targets: list[str] = field(default_factory=list)
    """Ends of the names of layers that get an adapter, such as c_attn; empty takes peft's choice for the model."""


@dataclass
class ModelConfig:
    """The network: a wide residual network from scratch, or a language model of the transformers library."""

    name: str = "wide_resnet"
    """wide_resnet for images; for text a label, such as roberta_base, that recipes and tables go by."""
    source: str | None = None
    """Text: a folder that `save_pretrained` wrote, or a name on the Hugging Face hub."""
    fresh: bool = False
    """Text: random weights, in the shape of `architecture` and `shape`, or of `source` where those are not given."""
    weights: str | None = None
    """A finished run's folder, or the model.pt in it, to start from; cut into any number of stages. Privacy adds up."""
    architecture: str | None = None
    """Text: transformers' model_type, such as roberta or gpt2, for fresh weights."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Text: arguments of that type's configuration, such as {n_layer: 2}."""
    tokenizer: str | None = None
    """Text: a folder or a name on the hub, or a folder with GPT-2's encoder.json and vocab.bpe; null takes `source`."""
    trains: str = "all"
    """Text: all | attention (self-attention and head) | bias (biases and head) | embeddings (of tokens, and head) |
    lora (adapters and head)."""
    pool: str = "first"
    """Classifiers: first | mean, the token or the mean of all tokens that the head reads."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    untie: bool = False
    """Text: give the head a copy of the token embedding, where the two are one parameter."""
    dropout: float | None = None
    """Text: of embeddings and residuals; null keeps the model's own."""
    attention_dropout: float | None = None
    attention: str = "sdpa"
    """Text: sdpa | eager."""
    frozen_dtype: str = "float32"
    """Text: float32 | bfloat16, of the parameters that do not train; those that train are float32."""
    depth: int = 16
    """Layers, 6n + 4."""
    width: int = 4
    """Channels, as a multiple of 16, 32, 64."""
    block_order: str = "deepmind"
    """classic | deepmind | order3: the paper does not say which; they differ by points of accuracy."""
    norm: str = "group"
    """group | batch; batch is refused as soon as clipping is on, because it mixes examples."""
    norm_groups: int = 16
    weight_standardization: bool = True


@dataclass
class DataConfig:
    """The examples."""

    name: str = "cifar10"
    """Images: cifar10 | digits (embedded, no network). Text: files (or the hub, for GLUE) | synthetic (made up here, no
    network)."""
    image_size: int | None = None
    """Side in pixels after average pooling; null keeps the images as they are."""
    train_limit: int | None = None
    """Keep only this many training examples, the first of each class (text: a fixed random choice); null keeps all."""
    train_file: str | None = None
    """Text: another training file, in the folder of the data set; null takes the usual name."""
    corpus: str | None = None
    """Pretraining: a text file, or a folder of them (.txt, .gz, .xz); null takes corpus/ in `paths.data`."""
    hub: str = "nyu-mll/glue"
    """GLUE: the data set on the hub (or a local copy of its folder) that is read when there are no tsv files."""
    holdout: float | None = None
    """Set this share of the training set aside and validate on it, for tuning (0.2 in the paper)."""
    max_length: int = 256
    """Text: tokens of an example, its end included; longer ones are cut, and the record says how many."""


@dataclass
class ClipConfig:
    """One clipping mode: grouping x how norms are got x threshold policy."""

    name: str = "adaptive_layer"
    grouping: str = "layer"
    """none | flat | layer | block | device | custom: the partition of the layers into K groups; device is one group for
    each stage of a pipeline, and so flat on a single one."""
    norms: str = "bookkeeping"
    """bookkeeping (one backward) | ghost (two backwards, nothing kept; one flat group only)."""
    policy: str = "adaptive"
    """fixed | adaptive: do the thresholds follow a private quantile?"""
    rule: str = "min"
    """min: min(1, C/norm) | automatic: C/(norm + gamma)."""
    gamma: float = 0.01
    """Stability constant of the automatic rule."""
    threshold: float = 1.0
    """C, the norm of the whole clipped gradient; each of K groups gets C/sqrt(K)."""
    initial_threshold: float | None = None
    """Adaptive: where each C_k starts; null starts at C/sqrt(K)."""
    target_quantile: float = 0.6
    """q: the share of examples that a threshold should leave unclipped."""
    quantile_learning_rate: float = 0.3
    """The step of the geometric threshold update (eta in the paper)."""
    quantile_budget: float = 0.01
    """r: the share of the privacy budget that pays for the counts."""
    rescale: bool = True
    """Adaptive: rescale the thresholds so that sqrt(sum C_k^2) = threshold."""
    count_at: str = "raw"
    """raw | rescaled: which threshold the counts are taken at; the paper does not say."""
    minimum: float = 1e-8
    """No adaptive threshold falls below this."""
    maximum: float = 1e8
    """No adaptive threshold rises above this."""
    formula: str = "auto"
    """auto | gram | materialize: how norms are computed, where a layer has the choice; the same to rounding."""
    mapping: dict[str, str] = field(default_factory=dict)
    """grouping=custom: glob of layer names -> group name; the first match counts."""


@dataclass
class NoiseConfig:
    """How the noise is shared out between the groups (gamma_k)."""

    allocation: str = "global"
    """global (gamma_k = 1) | equal_budget (gamma_k = C_k) | weighted (gamma_k = C_k / sqrt(d_k))."""
    secure: bool = False
    """Draw noise and batches from a cipher, and add the noise on a lattice: several times slower; docs/security.md."""


@dataclass
class PrivacyConfig:
    """The budget: either epsilon decides the noise, or noise_multiplier is given and epsilon follows."""

    epsilon: float | None = 8.0
    """inf means no noise and no guarantee."""
    delta: float | None = 1e-5
    """null: 1/N^1.1, N the number of training examples."""
    noise_multiplier: float | None = None
    sampling: str = "poisson"
    """poisson | shuffle (as published: its epsilon is not a guarantee)."""
    accountant: str = "prv"
    """prv | pld | rdp."""


@dataclass
class OptimConfig:
    """An optimiser and its learning-rate schedule, both from torch."""

    name: str = "sgd"
    """sgd | adam | adamw."""
    learning_rate: float = 1.0
    momentum: float = 0.0
    """sgd only."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    """adam and adamw only, as beta2 and eps."""
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: str = "constant"
    """constant | linear | cosine (to zero at the last step)."""
    warmup: float = 0.0
    """Fraction of the steps that the learning rate takes to rise linearly."""


@dataclass
class TrainConfig:
    """The loop."""

    batch_size: int | None = 4096
    """B: the expected logical batch size; one noisy update each. null: it follows from sample_rate."""
    sample_rate: float | None = None
    """rho: the probability that an example is drawn at a step, B = rho N; instead of batch_size."""
    epochs: float = 300.0
    steps: int | None = None
    """T: null means round(epochs * N / B)."""
    microbatch: int | None = None
    """Examples in memory at once; null chooses. It never changes the update."""
    token_loss: str = "mean"
    """Text: mean | sum of an example's losses over that example's own tokens; losses are summed over examples."""
    precision: str = "float32"
    """float32 | bfloat16 (autocast; norms, sums and noise stay float32)."""
    compile: bool = False
    device: str = "auto"
    """auto | cpu | cuda."""
    checkpoint_every: float = 60.0
    """Seconds between checkpoints (0: after every step); when one is written never changes the result."""
    keep: list[float] = field(default_factory=list)
    """Epochs at which the weights are kept, as weights-<step>.pt in the run's folder; 0 is before the first step."""
    channels_last: bool = True
    """Memory layout of convolutions."""
    threads: int | None = None
    """CPU threads of torch; null leaves its default. One is fastest for small networks."""


@dataclass
class GenerateConfig:
    """Beam search on the inputs of the validation or test set, at the end of a run (E2E, DART, SAMSum)."""

    beams: int = 4
    max_new_tokens: int = 100
    length_penalty: float = 1.0
    no_repeat_ngram: int = 0
    """No sequence of this many tokens twice; 0 allows it."""
    batch_size: int = 16
    limit: int | None = None
    """Generate for the first inputs only; 0 for none; null for all."""


@dataclass
class EvalConfig:
    """Evaluation on the training and the validation set, and on the test set where there is one."""

    every: float | None = None
    """Epochs between evaluations; null evaluates only at the end, which always happens."""
    curve: bool = False
    """Every evaluation is as whole as the last one: test set and generated texts too."""
    train_limit: int | None = None
    """Evaluate on this many training examples only; null takes all."""
    batch_size: int = 1000
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    shots: int | None = None
    """Train nothing, and generate from a prompt with this many training examples before the input; null trains."""
    prompt_set: int = 0
    """Which of the sets of examples is in the prompt (the paper averages over three)."""


@dataclass
class PipelineConfig:
    """The model cut into stages of consecutive blocks, a process and a device each (Algorithm 2)."""

    stages: int = 1
    """K of per-device clipping; 1 is no pipeline."""
    schedule: str = "1f1b"
    """1f1b | gpipe."""
    balance: str = "parameters"
    """parameters | time (measured on one microbatch): what is to be even between the stages."""
    blocks: list[int] = field(default_factory=list)
    """How many blocks each stage gets, by hand; empty balances."""
    rematerialize: bool = False
    """Keep only each block's input, and compute the block again in the backward pass."""
    timeout: float = 600.0
    """Seconds that a process waits for another before it gives up."""


@dataclass
class ParallelConfig:
    """Replicas of the model (or of the whole pipeline), each with its own share of every batch."""

    ranks: int = 1
    """Replicas; 1 is no data parallelism."""
    kind: str = "ddp"
    """ddp: a whole copy each | fsdp: parameters in shards (FSDP2)."""


@dataclass
class TrackerConfig:
    """Where metrics go beside the run's own files, which are always written."""

    name: str = "files"
    """files | wandb | tensorboard."""
    project: str = "groupwise"
    mode: str = "offline"
    """wandb only: offline | online | disabled."""


@dataclass
class PathsConfig:
    """Folders, relative to where the command is given."""

    data: str = "data"
    results: str = "results"


@dataclass
class DebugConfig:
    """For tests only."""

    noise_seed: int | None = None
    """Seeded noise can be repeated, so the run is stamped "not private"."""


@dataclass
class RunConfig:
    """One run, complete: two equal RunConfigs on the same machine are the same experiment."""

    task: str = "cifar"
    own_task: dict[str, Any] = field(default_factory=dict)
    """A task of your own: {_target_: module.function}, and what else the function takes besides (config, device)."""
    scale: str = "paper"
    """paper | midi | mini | demo | smoke: written into every result row."""
    seed: int = 0
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
    """The folder of an unfinished run to take up again."""
    overwrite: bool = False
    """Throw away what this very configuration left behind, finished or not, and start afresh."""
    export: str | None = None
    """Text: also write the trained model as a transformers folder, with its tokenizer, recipe and hash."""
    explain: bool = False
    """Print how each layer's norms are computed, and why; then stop, with nothing trained or written."""
