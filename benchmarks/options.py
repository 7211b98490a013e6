"""Reads and checks the options of the benchmarks, spells them out into jobs, and gives their commands exit codes."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from benchmarks.job import Job
from groupwise.errors import UserError, did_you_mean

T = TypeVar("T")
HELP = """python -m benchmarks.throughput [key=value ...]

  workload=all     wrn16_4_ws, wrn16_4_conv, roberta_base, gpt2, gpt2_untied, mlp, lora_gpt2, llama, lora_llama;
                   several by commas; gpt2_64 (64 tokens) and lora_gpt2_xl only when they are named
  method=all       none, flat, ghost, fixed_layer, adaptive_layer, block, opacus_hooks, opacus_functorch,
                   opacus_ghost, opacus_per_layer; several by commas (none always runs: ratios are to it);
                   fastdp_layer, fastdp_flat, private_transformers, where peers= says where they are;
                   none_matmul: none, with the products of ours;
                   none_again, only when it is named: none in a second process, so its spread is the clock's
  batch=4,8        batch sizes; default the workload's own
  layers=4         transformer blocks of the language models; the full shapes have 12, llama and lora_llama 30,
                   lora_gpt2_xl 48
  rounds=5         how often each method has its turn
  steps=3          steps on the clock in a turn, after one to warm up
  threads=1        threads of each process; processes run one at a time
  device=cpu       or cuda
  dtype=float32    or bfloat16 (autocast), float64
  limit=900        seconds that one turn may take
  out=results/measured/benchmarks   the folder of throughput.csv
  peers=FOLDER     whose subfolders are checkouts of fast-differential-privacy and private-transformers
  tiny=false       true: the smallest sizes, to see that everything runs

  python -m benchmarks.throughput workload=gpt2_untied
  python -m benchmarks.throughput workload=gpt2 method=flat,adaptive_layer batch=1,2,4,8 rounds=3
  python -m benchmarks.throughput device=cuda dtype=bfloat16 workload=gpt2 batch=64 layers=12"""


@dataclass
class Options:
    """What the command line may say; see `HELP`. Names and batch sizes may be several, by commas."""

    workload: str = "all"
    method: str = "all"
    batch: str | None = None
    layers: int = 4
    rounds: int = 5
    steps: int = 3
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    limit: float = 900.0
    out: str = "results/measured/benchmarks"
    peers: str | None = None
    tiny: bool = False

    @property
    def workloads(self) -> list[str]:
        """The names asked for."""
        from benchmarks.workloads import WORKLOADS

        every = [name for name, kind in WORKLOADS.items() if kind.in_all]
        return every if self.workload == "all" else split(self.workload)

    @property
    def methods(self) -> list[str]:
        """The names asked for, `none` first."""
        from benchmarks.methods import METHODS
        from benchmarks.research_peers import package_of

        named = {"none_again"} if self.peers else {"none_again", *filter(package_of, METHODS)}
        every = [name for name in METHODS if name not in named]
        return every if self.method == "all" else list(dict.fromkeys(["none", *split(self.method)]))

    @property
    def batches(self) -> list[int | None]:
        """The batch sizes asked for; None is a workload's own."""
        if self.batch is None:
            return [None]
        if not all(part.isdigit() and int(part) > 0 for part in split(self.batch)):
            raise UserError(f"batch={self.batch} was given; use whole numbers of at least 1, by commas.")
        return [int(part) for part in split(self.batch)]


def parse(arguments: Sequence[str]) -> Options:
    """Read and check the command line.

    Raises:
        UserError: an unknown key or value, an absent GPU.
    """
    options = read(Options, arguments)
    _check(options)
    return options


def read(schema: type[T], arguments: Sequence[str]) -> T:
    """The command line `key=value …` as an instance of the dataclass `schema`.

    Raises:
        UserError: an unknown key, or a value of another type.
    """
    known = [field.name for field in fields(schema)]  # type: ignore[arg-type]
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals:
            raise UserError(f"'{argument}' cannot be read as key=value; --help lists the keys.")
        if key not in known:
            raise UserError(f"there is no key {key}{did_you_mean(key, known)}; --help lists them.")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.from_cli(list(arguments)))
        options = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise UserError(f"there is no key {error.full_key}; --help lists them.") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key} does not fit: {str(error).splitlines()[0]}.") from None
    assert isinstance(options, schema)
    return options


def cases(options: Options) -> list[Job]:
    """One job for each workload and batch size; its method is filled in by the driver."""
    from benchmarks.workloads import WORKLOADS

    return [
        Job(
            workload=workload,
            method="none",
            batch=batch,
            layers=None if options.tiny or WORKLOADS[workload].layers is None else options.layers,
            device=options.device,
            dtype=options.dtype,
            threads=options.threads,
            tiny=options.tiny,
        )
        for workload, batch in product(options.workloads, options.batches)
    ]


def _check(options: Options) -> None:
    from benchmarks import methods, research_peers, workloads

    check_above_zero(options, "layers", "rounds", "steps", "threads", "limit")
    for name in options.workloads:
        workloads.check(name, batch=None, layers=None, dtype=options.dtype)
    for name in options.methods:
        methods.check(name)
    if options.peers:
        research_peers.put_on_path(options.peers)
    _ = options.batches
    check_device(options.device)


def check_above_zero(options: object, *names: str) -> None:
    """Refuse numbers that are not above 0.

    Raises:
        UserError: naming the first of them.
    """
    for name in names:
        if not getattr(options, name) > 0:
            raise UserError(f"{name}={getattr(options, name)} was given; use a number above 0.")


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        UserError: neither cpu nor cuda; cuda without a GPU.
    """
    if device not in ("cpu", "cuda"):
        raise UserError(f"device={device} is unknown: give cpu or cuda.")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("device=cuda was asked for, but torch sees no GPU here: give device=cpu.")


def split(names: str) -> list[str]:
    """Names given by commas."""
    return [part.strip() for part in str(names).split(",") if part.strip()]


def names(key: str, given: str, known: Iterable[str]) -> list[str]:
    """What the value of an option names, by commas; "all" is all that are known.

    Raises:
        UserError: one of them is unknown.
    """
    known = list(known)
    found = known if given == "all" else split(given)
    for name in found:
        if name not in known:
            raise UserError(f"{key}={name} is unknown{did_you_mean(name, known)}: give {', '.join(known)}.")
    return found


MISTAKE, INTERRUPTED = 2, 130


def command(run: Callable[[list[str]], int | None], help_text: str, kept: str, arguments: Sequence[str] | None) -> int:
    """Run a command line and return its exit code: that of `run`, 2 for a mistake, 130 when interrupted.

    Args:
        run: does what the arguments ask for; None is 0.
        help_text: printed for -h and --help.
        kept: what an interruption leaves behind, in words.
        arguments: None takes those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(help_text)
        return 0
    try:
        return run(given) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print(f"interrupted: {kept}", file=sys.stderr)
        return INTERRUPTED
