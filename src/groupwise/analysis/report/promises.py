"""What the measured runs promise: δ, adjacency, sampler and the ε that was spent, a line for each kind of run."""

import pandas as pd

from groupwise.analysis.table_notes import ADJACENCY, SAMPLING

PLAN = ("plan.dataset_size", "plan.delta", "plan.adjacency", "plan.sampling", "plan.accountant", "plan.private")
COLUMNS = ("task", "N", "δ", "for", "batches", "accountant", "ε spent", "runs", "a guarantee")


def promises(rows: pd.DataFrame) -> list[dict[str, str]]:
    """Lines with the keys `COLUMNS`, from measured rows all columns text; each run counts once, whatever its sweeps."""
    if rows.empty or any(column not in rows for column in (*PLAN, "plan.spent_epsilon")):
        return []
    rows = rows.drop_duplicates("hash").fillna(dict.fromkeys(PLAN, ""))  # other sweeps' rows may lack a column
    rows = rows.assign(task=rows["cell"].str.extract(r"\btask=(\S+)", expand=False).fillna(""))
    found = []
    for place, same in rows.groupby(["task", *PLAN], sort=True):
        task, size, delta, adjacency, sampling, accountant, private = (str(text) for text in place)
        found.append(
            {
                "task": task,
                "N": f"{_number(size):,.0f}" if size else "–",
                "δ": f"{_number(delta):.3g}" if delta else "–",
                "for": ADJACENCY.get(adjacency, adjacency) or "–",
                "batches": SAMPLING.get(sampling, sampling) or "–",
                "accountant": accountant.upper() or "–",
                "ε spent": _spent(same) if private == "True" else "–",
                "runs": str(len(same)),
                "a guarantee": "yes" if private == "True" else "no",
            }
        )
    return found


def _spent(rows: pd.DataFrame) -> str:
    targets = pd.to_numeric(rows["plan.epsilon"], errors="coerce")
    spent = pd.to_numeric(rows["plan.spent_epsilon"], errors="coerce")
    most = spent.groupby(targets).max()
    return ", ".join(f"{value:.3f} of {target:g}" for target, value in most.items())


def _number(text: str) -> float:
    return float(pd.to_numeric(text, errors="coerce"))
