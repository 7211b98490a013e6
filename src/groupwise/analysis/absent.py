"""Why a cell has no row: what it would take, by what it is made of."""

from collections.abc import Sequence

from groupwise.analysis.paper import settings_of
from groupwise.cells import PAPER, Sweep
from groupwise.errors import UserError

OBSTACLES: tuple[tuple[dict[str, str], str], ...] = (
    (
        {"model": "opt_175b"},
        "OPT-175B: the paper's GPT-3 took 16 GPUs of 32 GB for 15 hours, and 22 to decode",
    ),
    ({"model": "gpt2_xl"}, "GPT-2-xl (1.6 billion parameters) on a GPU"),
    ({"model": "gpt2"}, "GPT-2 on a GPU"),
    ({"model": "roberta_large"}, "RoBERTa-large on a GPU"),
    ({"model": "roberta_base"}, "RoBERTa-base on a GPU"),
    ({"task": "cifar"}, "WRN16-4 for 300 epochs on a GPU"),
)
"""Settings, and what a cell that has them needs at the paper's scale; the first that fits counts."""
LEFT_OUT: tuple[tuple[dict[str, str], str], ...] = (
    ({"model": "roberta_large"}, "the small model stands for RoBERTa-base"),
    ({"task": "mnli"}, "there was no training data of it here"),
    ({"task": "qqp"}, "there was no training data of it here"),
)
"""Settings, and why a smaller scale has no such cell."""


def needs(cells: Sequence[str]) -> str:
    """What the cells take at the paper's scale, in a phrase."""
    return "; ".join(dict.fromkeys(f"scale={PAPER} needs {_first(OBSTACLES, cell) or 'a GPU'}" for cell in cells))


def why_not_run(sweep: Sweep, cells: Sequence[str]) -> str:
    """The same of cells without a row, and what became of them at smaller scales."""
    smaller = [at for at in ("midi", "mini", "demo") if at in sweep.scales]
    left_out = [at for at in smaller if not _has(sweep, at, cells)]
    if len(left_out) < len(smaller):
        waiting = next(at for at in smaller if at not in left_out)
        return f"{needs(cells)}; scale={waiting} waits to be run"
    reasons = dict.fromkeys(filter(None, (_first(LEFT_OUT, cell) for cell in cells)))
    where = f"; left out of scale={left_out[0]}" if left_out else ""
    return needs(cells) + where + "".join(f": {why}" for why in reasons)


def _has(sweep: Sweep, scale: str, cells: Sequence[str]) -> bool:
    try:
        return set(cells) <= {cell.name for cell in sweep.cells(scale)}
    except UserError:
        return False


def _first(reasons: Sequence[tuple[dict[str, str], str]], cell: str) -> str:
    settings = settings_of(cell).items()
    return next((why for wanted, why in reasons if wanted.items() <= settings), "")
