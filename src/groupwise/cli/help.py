"""Writes what `python run.py --help` prints, read off `conf/` without composing anything."""

from __future__ import annotations

import textwrap
from pathlib import Path

from groupwise.config.keys import groups

WIDTH = 80
"""Columns of a terminal."""
EVERYDAY = {
    "privacy.epsilon=3": "the budget; inf trains without noise",
    "privacy.delta=1e-5": "below one over the number of examples",
    "privacy.noise_multiplier=2.5": "give the noise instead of epsilon",
    "seed=1": "initial weights; noise comes from a secret key",
    "clip.threshold=0.5": "C, the norm of the whole clipped gradient",
    "clip.target_quantile=0.7": "adaptive: the share left unclipped",
    "optim.learning_rate=2": "",
    "train.batch_size=1024": "expected logical batch size",
    "train.epochs=100": "or train.steps=500",
    "train.microbatch=64": "examples in memory at once; default automatic",
    "train.precision=bfloat16": "norms, sums and noise stay float32",
    "train.device=cpu": "auto, cpu or cuda",
    "pipeline.stages=4": "cut the model into stages, a process each",
    "parallel.ranks=2": "replicas that share every batch, a process each",
    "paths.data=~/data": "default $GROUPWISE_DATA, else data",
    "paths.results=out": "default results",
    "overwrite=true": "run again what is already done",
    "explain=true": "how norms are computed, and why; no training",
}


def help_text(conf: Path) -> str:
    """Usage, the groups and their options, the everyday keys and a few commands."""
    lines = [
        "Private training with group-wise clipping.",
        "",
        "  python run.py task=cifar clip=adaptive_layer scale=demo",
        "",
        "Groups (choose with group=option):",
    ]
    for name, options in groups(conf).items():
        lines += textwrap.wrap(f"  {name:9} {', '.join(options)}", WIDTH, subsequent_indent=" " * 12)
    lines += ["", "Everyday keys (src/groupwise/config/schema.py has them all):"]
    lines += [f"  {example:30} {meaning}".rstrip() for example, meaning in EVERYDAY.items()]
    lines += [
        "",
        "More:",
        "  python run.py -m clip=flat,ghost seed=0,1,2   every combination, in turn",
        "  python run.py clip=flat --cfg job             the configuration, without a run",
        "  python run.py --why clip.threshold task=sst2  which lines gave a key its value",
        "  python run.py --hydra-help                    Hydra's own flags",
        "",
        "A run is recorded in results/runs/<hash>; the same command resumes it, or shows",
        "it when it is done.",
    ]
    return "\n".join(lines)
