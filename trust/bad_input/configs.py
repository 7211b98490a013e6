"""Command lines with something wrong in them, or unusual: keys, types, ranges, text, paths, pairs, grammar, flags."""

import random
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, get_args

from groupwise.config.checks import PLACES
from groupwise.config.keys import CHOICES, groups, key_types
from trust.bad_input.attempt import ROOT, Attempt

NOT_NUMBERS = (
    "many", "[1,2]", "[]", "{}", "{a:1}", "null", "true", "false", "1.5", "''", '""', "1e400", "nan", "inf", "-inf",
    "0x10", "1_000", "²", "½", "１２", "1e", "1,5", "--1", "+1", "[[1]]", "[null]", "{a:{b:1}}", "[true]", "on", "~",
    "1.0", "3.0", "1e3", "text", "None", "[nan]", "[-1]", "['']",
)  # fmt: skip
UNUSUAL = (
    "-1", "0", "-0.0", "1", "2", "0.5", "0.999999999999", "1.0000001", "1e-320", "1e-30", "1e30", "1e308", "-1e308",
    "nan", "inf", "-inf", "-2147483649", "3", "7", "0.1", "1e-3", "1e-12",
)  # fmt: skip
ENDS = (
    "0", "-0.0", "5e-324", "1e-320", "1e-300", "1e-160", "1e-38", "1e-15", "1e-8", "1e-7", "0.5", "0.9999999999999999",
    "1", "1e7", "1e8", "1e15", "999999999999999.9", "1e38", "1e160", "1e300", "1.7976931348623157e308", "inf", "-inf",
    "nan", "-1e-300", "-1e8", "-1e300", "2147483647", "4611686018427387904", "-4611686018427387904",
)  # fmt: skip
HUGE = (
    "1e9", "1000000", "1000000000", "1e18", "9223372036854775807", "9223372036854775808", "18446744073709551616",
    "1" + "0" * 40, "1" + "0" * 400, "9" * 5000, "-9223372036854775809", "1e307", "2147483648", "123456789012",
)  # fmt: skip
EMPTY = (
    "KEY=",
    "KEY=''",
    'KEY=""',
    "KEY",
    "=",
    "",
    " ",
    "KEY= ",
    "KEY=[]",
    "KEY={}",
    "~KEY",
    "+KEY=",
    "++KEY=",
    "KEY='  '",
)
TEXTS = (
    "ünïcödé", "数字", "🙂" * 3, "\u202eright to left", "a\u0300\u0301", "\x1b[31mred\x1b[0m", "bell\x07", "tab\tin",
    "new\nline", "carriage\rreturn", "\ufeffbom", "\u0000".replace("\u0000", "\u2400"), "\udcff\udcfe", "\ud800",
    "zero\u200bwidth", "İ", "ß", "\u2028line", "x" * 300, "x" * 5000, "é" * 200, "'", '"', "\\", "`", "%s%n", "{}",
    "\x7f", "\x01\x02",
)  # fmt: skip
INJECTIONS = (
    "${oc.env:PATH}", "${oc.env:NOT_SET_ANYWHERE}", "${oc.env:NOT_SET,0.5}", "${seed}", "${clip}",
    "${clip.threshold}", "${train.batch_size}", "${nothing.there}", "${paths.data}/x", "${hydra:runtime.cwd}",
    "${hydra.job.name}", "${now:%s}", "${oc.decode:'1+1'}", "${oc.select:clip,3}", "${oc.create:{a:1}}",
    "${by_epsilon:{3:1,8:2}}", "${by_epsilon:{}}", "${by_epsilon:3}", "${by:x,{y:1}}",
    "${by_mode:{flat:1,*:2}}", "${by:${task},{cifar:1,*:2}}", "${joint:1,2}", "${joint:a,b}",
    "${joint:1}", "${unknown:1}", "${", "${}",
    "$(touch here)", "`touch here`", "; touch here", "| touch here", "&& touch here",
    "!!python/object/apply:os.system ['touch here']", "{{7*7}}", "%(key)s", "{0.__class__}", "__import__('os')",
    "${oc.dict.values:clip}", "${oc.deprecated:seed}", "???", "<<: *x", "&a [*a]", "../../x", "${.name}", "${..seed}",
    "${oc.env:${oc.env:PATH}}", "\\${seed}",
)  # fmt: skip
PATHS = (
    "../..", "../../../../etc/passwd", "/etc/passwd", "/dev/null", "/dev/zero", "/proc/self/mem",
    "/proc/self/cmdline", "/", ".", "..", "~", "~nobody/x", "~no_such_user_at_all/x", "/root/not/there", "a" * 300,
    "a/" * 2000, "con\nx", "nul\ttab", "-rf", "--help", "file:///etc/passwd", "http://localhost:1/x", "s3://bucket/x",
    "//x//y", "./", "a b", "$HOME", "%TEMP%", "..\\..\\x", "C:\\x", "x/../../y", "\udcff", "/dev/full", "/sys/kernel",
    "pretrained", "results", "data/../..", "gpt2/../../x", "hf://x", "owner/name/too/long", "@main", "name@revision",
    "*", "?", "[a]", "x:y", "x#y", "x?y=z",
)  # fmt: skip
FRAGMENTS = (
    "clip=[", "clip={", "clip=]", "a=b=c", "KEY==1", "~KEY", "~KEY=1", "+KEY=3", "++KEY=1", "clip@foo=flat",
    "optim@_global_=sgd", "KEY@x=1", "clip=[flat,ghost]", "KEY=range(3)", "KEY=choice(1,2)", "KEY=1,2", "KEY=glob(*)",
    "KEY=interval(0,1)", "KEY=shuffle(1,2)", "KEY=sort(2,1)", "KEY=tag(a,choice(1,2))", "KEY=int(1.5)", "KEY=str(1)",
    "KEY=float(x)", "KEY=bool(2)", "KEY=json_str('{}')", "KEY=extend_list(1)", "KEY='", 'KEY="', "KEY=\\", "KEY=(1)",
    "KEY=[1,2", "KEY={a:1", "KEY={a:}", "KEY={:1}", "KEY=a:b", "+clip.mapping={a:b}", "+clip.mapping={*:x}",
    "+model.shape={n_layer:1}", "+model.shape={x:{y:1}}", "+clip.mapping={a:1}", "+clip.mapping={a:null}",
    "+clip.mapping.x=y", "hydra.verbose=true", "hydra/job_logging=nothing", "hydra.mode=MULTIRUN",
    "hydra.job.chdir=true", "hydra/launcher=nothing", "sweep.grids=3", "+hydra.x=1", "defaults=[]",
    "+defaults=[x]", "_target_=os.system", "+_target_=os.system", "+clip._target_=os.system", "+_args_=[x]",
    "_self_=1", "schema=x", "+schema=schema", "recipe=glue", "recipe=x", "size=x", "tuned=x",
    "size=glue/mini", "model=../task/cifar", "clip=../../x", "task=/etc/passwd", "clip=/etc/passwd",
    "clip=flat.yaml", "clip=", "clip=null", "task=", "task=[]", "--cfg", "--cfg=job", "--cfg=nothing", "--package=x",
    "--info=all", "--info=x", "--config-name=x", "--config-name=../x", "--config-dir=/nowhere", "--config-path=x",
    "--resolve", "--run", "-c", "-x", "--", "--experimental-rerun=x", "--version", "--shell-completion=install=bash",
    "--hydra-help", "--multirun=1", "-h=1",
)  # fmt: skip
SENSIBLE: dict[str, tuple[str, ...]] = {
    "seed": ("0", "1", "123", "4294967296"),
    "privacy.epsilon": ("0.1", "1", "3", "8", "100", "inf", "null"),
    "privacy.delta": ("1e-5", "1e-10", "0.001", "0.5", "null"),
    "privacy.noise_multiplier": ("0", "0.5", "1", "20", "null"),
    "clip.threshold": ("1e-6", "0.1", "1", "100"),
    "clip.initial_threshold": ("0.1", "1", "null"),
    "clip.target_quantile": ("0.01", "0.5", "0.99"),
    "clip.quantile_learning_rate": ("0.01", "0.3", "10"),
    "clip.quantile_budget": ("0.001", "0.01", "0.5", "0.999"),
    "clip.rescale": ("true", "false"),
    "clip.minimum": ("1e-8", "1"),
    "clip.maximum": ("1e8", "1"),
    "clip.gamma": ("0", "0.01", "1"),
    "optim.learning_rate": ("1e-6", "0.1", "10", "1e6"),
    "optim.momentum": ("0", "0.9"),
    "optim.weight_decay": ("0", "0.1", "10"),
    "optim.warmup": ("0", "0.1", "0.99"),
    "train.batch_size": ("1", "7", "64", "null"),
    "train.sample_rate": ("0.01", "0.5", "1", "null"),
    "train.steps": ("1", "2", "5", "null"),
    "train.epochs": ("0.01", "0.1"),
    "train.microbatch": ("1", "5", "1000", "null"),
    "train.checkpoint_every": ("0", "1"),
    "train.keep": ("[]", "[0]", "[0,0.05,100]"),
    "train.channels_last": ("true", "false"),
    "train.threads": ("1", "2", "null"),
    "eval.every": ("0.01", "null"),
    "eval.curve": ("true", "false"),
    "eval.train_limit": ("1", "7", "null"),
    "eval.batch_size": ("1", "64"),
    "eval.generate.beams": ("1", "3"),
    "eval.generate.max_new_tokens": ("1", "3"),
    "eval.generate.no_repeat_ngram": ("0", "1", "3"),
    "eval.generate.length_penalty": ("0", "-1", "2"),
    "eval.generate.limit": ("0", "1"),
    "eval.shots": ("0", "1", "null"),
    "eval.prompt_set": ("0", "1", "2"),
    "data.name": ("digits", "cifar10", "files", "synthetic"),
    "data.image_size": ("4", "8", "3", "null"),
    "data.train_limit": ("1", "2", "33", "null"),
    "data.holdout": ("0", "0.01", "0.2", "0.99", "null"),
    "data.max_length": ("1", "4", "16", "129", "130"),
    "model.depth": ("10", "16", "11"),
    "model.width": ("1", "2"),
    "model.norm_groups": ("1", "4", "16", "5"),
    "model.weight_standardization": ("true", "false"),
    "model.fresh": ("true", "false"),
    "model.architecture": ("gpt2", "roberta", "bert", "opt", "llama", "t5", "null"),
    "model.untie": ("true", "false"),
    "model.dropout": ("0", "0.5", "null"),
    "model.attention_dropout": ("0", "0.5", "null"),
    "model.lora.rank": ("1", "4"),
    "model.lora.targets": ("[]", "[c_attn]", "[query,value]", "[wte]", "[nothing]"),
    "pipeline.stages": ("1", "2", "9"),
    "pipeline.blocks": ("[]", "[1,1]", "[0]"),
    "parallel.ranks": ("1", "2"),
    "explain": ("true", "false"),
    "overwrite": ("true", "false"),
    "debug.noise_seed": ("0", "1", "null"),
    "+model.shape.n_layer": ("1", "0", "-1", "x"),
    "+model.shape.hidden_size": ("8", "7", "0"),
}


CLIPS = (
    "none", "flat", "ghost", "fixed_layer", "adaptive_layer", "fixed_block", "adaptive_block", "adaptive_flat",
    "per_device", "adaptive_device",
)  # fmt: skip
TASKS = ("cifar", "cifar", "cifar", "sst2", "qnli", "qqp", "mnli", "e2e", "dart", "samsum")
SLOW = (
    "train.compile",
    "pipeline",
    "parallel.ranks",
    "tracker",
    "-m",
    "train.steps=null",
    "train.epochs=1",
    "--multirun",
    "export",
    "paths.results",
)
"""Parts of command lines that are checked but not carried out here: compilers, processes, services, long runs."""
LONG = ("train.steps", "train.epochs", "model.depth", "model.width")
"""Keys whose huge values are fine, and never end."""
Maker = Callable[[random.Random], list[str]]


def config_attempts(seed: int, count: int) -> Iterator[Attempt]:
    """`count` command lines, as many of each kind as of the others; those at the smallest scale go on to train."""
    draw = random.Random(seed)
    for kind, make in KINDS.items():
        for _ in range(count // len(KINDS)):
            given = make(draw)
            trains = "scale=smoke" in given and not any(part in word for word in given for part in SLOW)
            trains = trains and not (kind in ("huge", "ends of ranges") and given[-1].startswith(LONG))
            yield Attempt(f"config: {kind}", given, trains=trains)


def base(draw: random.Random, smoke: bool = True) -> list[str]:
    """A command line that is fine: any task, clipping mode and scale (or the smallest)."""
    scale = "smoke" if smoke else draw.choice(("smoke", "mini", "demo", "paper"))
    clip = draw.choice(CLIPS)
    budget = [] if clip == "none" else [f"privacy.epsilon={draw.choice((1, 1, 3, 8))}"]  # small ones are accounted fast
    return [f"scale={scale}", f"task={draw.choice(TASKS)}", f"clip={clip}", *budget, "train.device=cpu"]


LEAVES = {key: kind for key, kind in key_types().items() if not hasattr(kind, "__dataclass_fields__")}
GROUPS = groups(ROOT / "conf")


def _of(kind: Any, *wanted: type) -> bool:
    return any(part in wanted for part in (get_args(kind) or (kind,)))


NUMBERS = [key for key, kind in LEAVES.items() if _of(kind, int, float) and not _of(kind, list)]
WORDS = [key for key, kind in LEAVES.items() if _of(kind, str) and key not in CHOICES]


def quoted(text: str) -> str:
    """Text as a value that Hydra's grammar takes as it is."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _misspelt(draw: random.Random) -> list[str]:
    key = draw.choice([*LEAVES, *GROUPS])
    at = draw.randrange(len(key))
    wrong = draw.choice(
        (key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], key[:at] + "x" + key[at + 1 :], key.upper(),
         key.replace(".", "_"), key.rpartition(".")[2] + "_", f"{key}.{key}", f"hydra.{key}", key + "é")
    )  # fmt: skip
    return [*base(draw), f"{draw.choice(('', '+', '++', '~'))}{wrong}={draw.choice(('1', 'true', 'text', 'null'))}"]


def _wrong_type(draw: random.Random) -> list[str]:
    return [*base(draw), f"{draw.choice(list(LEAVES))}={draw.choice(NOT_NUMBERS)}"]


def _out_of_range(draw: random.Random) -> list[str]:
    return [*base(draw), f"{draw.choice(NUMBERS)}={draw.choice(UNUSUAL)}"]


def _huge(draw: random.Random) -> list[str]:
    return [*base(draw), f"{draw.choice(NUMBERS)}={draw.choice(HUGE)}"]


BUDGET = ("privacy.epsilon", "privacy.delta", "privacy.noise_multiplier", "clip.quantile_budget", "train.sample_rate")
"""Keys that the search for the noise follows to the ends of its range."""


def _ends(draw: random.Random) -> list[str]:
    key = draw.choice((draw.choice(BUDGET), draw.choice(NUMBERS)))
    whole = ["privacy.epsilon=null"] if key == "privacy.noise_multiplier" else []
    whole += ["train.batch_size=null"] if key == "train.sample_rate" else []
    return [*base(draw), *whole, f"{key}={draw.choice(ENDS)}"]


def _empty(draw: random.Random) -> list[str]:
    key = draw.choice([*LEAVES, *GROUPS])
    return [*base(draw), draw.choice(EMPTY).replace("KEY", key)]


def _unicode(draw: random.Random) -> list[str]:
    text = draw.choice(TEXTS)
    if draw.random() < 0.2:
        return [*base(draw), text + draw.choice(("", "=1", "=x"))]
    value = quoted(text) if draw.random() < 0.7 else text
    return [*base(draw), f"{draw.choice([*WORDS, *WORDS, *LEAVES])}={value}"]


def _injection(draw: random.Random) -> list[str]:
    value = draw.choice(INJECTIONS)
    return [*base(draw), f"{draw.choice([*WORDS, *LEAVES, 'clip', 'task'])}={draw.choice((value, quoted(value)))}"]


def _path(draw: random.Random) -> list[str]:
    return [*base(draw), f"{draw.choice([*PLACES, *PLACES, *GROUPS])}={quoted(draw.choice(PATHS))}"]


def _fragment(draw: random.Random) -> list[str]:
    given = base(draw)
    given.insert(draw.randrange(len(given) + 1), draw.choice(FRAGMENTS).replace("KEY", draw.choice([*LEAVES, *GROUPS])))
    return given


def _valid(draw: random.Random) -> str:
    """A key or group with a value of its own."""
    if draw.random() < 0.3:
        group = draw.choice([name for name in GROUPS if name not in ("scale", "sweep", "task")])
        return f"{group}={draw.choice(GROUPS[group])}"
    if draw.random() < 0.4:
        key = draw.choice(list(CHOICES))
        return f"{key}={draw.choice(CHOICES[key])}"
    key = draw.choice(list(SENSIBLE))
    return f"{key}={draw.choice(SENSIBLE[key])}"


def _pair(draw: random.Random) -> list[str]:
    return [*base(draw), *(_valid(draw) for _ in range(2))]


def _many(draw: random.Random) -> list[str]:
    return [*base(draw), *(_valid(draw) for _ in range(draw.randrange(3, 9)))]


def _other_scales(draw: random.Random) -> list[str]:
    return [*base(draw, smoke=False), *(_valid(draw) for _ in range(2))]


def _any_value(draw: random.Random) -> list[str]:
    """Keys and values that were never meant for each other."""
    values = [*NOT_NUMBERS, *UNUSUAL, *(value for some in SENSIBLE.values() for value in some)]
    return [*base(draw), *(f"{draw.choice(list(LEAVES))}={draw.choice(values)}" for _ in range(2))]


def _null(draw: random.Random) -> list[str]:
    optional = [key for key, kind in LEAVES.items() if _of(kind, NoneType)]
    key = draw.choice([*optional, *LEAVES, *(key.partition(".")[0] for key in LEAVES)])
    return [*base(draw), f"{key}=null", *([_valid(draw)] if draw.random() < 0.5 else [])]


KINDS: dict[str, Maker] = {
    "unknown key": _misspelt,
    "wrong type": _wrong_type,
    "out of range": _out_of_range,
    "huge": _huge,
    "ends of ranges": _ends,
    "null": _null,
    "empty": _empty,
    "unicode": _unicode,
    "injection": _injection,
    "path": _path,
    "grammar": _fragment,
    "random value": _any_value,
    "two valid keys": _pair,
    "many valid keys": _many,
    "other scales": _other_scales,
}
