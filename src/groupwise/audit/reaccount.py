"""Recomputes ε of a finished run from its record:  python -m groupwise.audit.reaccount results/runs/HASH

It recomputes ε with dp_accounting's privacy loss distributions, for any accountant of the run. It checks that the
values behind ε follow from the configuration and the logged steps. It only reads files, and cannot detect a folder in
which all files were forged consistently.
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from groupwise.config.identity import GONE, LATER, VOLATILE, flatten
from groupwise.errors import UserError, command
from groupwise.privacy.accountants import epsilon_pld
from groupwise.rows import markdown
from groupwise.training.earlier_runs import counted, total

LOOSE, TIGHT = 1e-3, 1e-6
"""Relative tolerances for claimed against recomputed ε, and for ε above the target."""
Record = dict[str, Any]
"""The contents of a run's files: `config` (flat), `plan`, `privacy`, `data`, `seeds`, `result`, `logged`, `folder`."""


class Disagrees(Exception):
    """Two values that must agree differ; the message names them."""


def read(folder: Path) -> Record:
    """Read the record of a finished run, including keys that are unknown to this version."""
    record: Record = {"folder": folder}
    for name in ("privacy", "data", "seeds", "result"):
        record[name] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    written = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    record["config"] = GONE | flatten(written)  # type: ignore[arg-type]
    plan = record["privacy"]["plan"]
    record["plan"] = {**plan, "epsilon": float(plan["epsilon"])}  # "inf" in the file
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    record["logged"] = [line["step"] for line in lines if "learning_rate" in line]
    return record


def configuration(record: Record) -> str:
    """Check that config.yaml has the hash in config.hash, and that result.json has this hash, settings and plan."""
    kept = {key: value for key, value in record["config"].items() if not key.startswith(VOLATILE)}
    stable = {key: value for key, value in kept.items() if key not in LATER or value != LATER[key]}
    found = hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()
    if (record["folder"] / "config.hash").read_text(encoding="utf-8").strip() != found:
        raise Disagrees(f"config.yaml has the hash {found[:12]}, but config.hash has another")
    plan = {f"plan.{key}": value for key, value in record["plan"].items()}
    same(record["result"], {"hash": found, **stable, **plan}, "result.json")
    return found[:12]


def plan_follows(record: Record) -> str:
    """Check that N, B, T, δ, ε or σ, r and sampling follow from the configuration, and 1/σ_new² + K/(4σ_b²) = 1/σ²."""
    config, plan = record["config"], record["plan"]
    size, batch = record["data"]["train_examples"], config["train.batch_size"]
    batch = max(1, round(config["train.sample_rate"] * size)) if batch is None else batch
    share = config["clip.quantile_budget"] if config["clip.policy"] == "adaptive" else 0.0
    sigma, budget = config["privacy.noise_multiplier"], config["privacy.epsilon"]
    if config["clip.grouping"] == "none":
        share, sigma, budget = 0.0, 0.0, math.inf
    asked = {"epsilon": float(budget)} if sigma is None else {"noise_multiplier": sigma}
    sigma = plan["noise_multiplier"]
    expected = {
        "dataset_size": size,
        "expected_batch_size": batch,
        "steps": config["train.steps"] or max(1, round(config["train.epochs"] * size / batch)),
        "delta": size**-1.1 if config["privacy.delta"] is None else config["privacy.delta"],
        "sampling": config["privacy.sampling"],
        "accountant": config["privacy.accountant"],
        "adjacency": "add_remove",
        "quantile_budget": share,
        "count_noise_multiplier": sigma * math.sqrt(plan["num_groups"] / (4.0 * share)) if share else 0.0,
        "gradient_noise_multiplier": sigma / math.sqrt(1.0 - share),
    }
    same(plan, expected | asked, "the plan")
    return f"N = {size}, B = {batch:g}, T = {plan['steps']}, delta = {plan['delta']:.3g}, sigma = {sigma:.5g}"


def steps(record: Record) -> str:
    """Check that every step from 1 to T was logged once, in order, and that T steps were accounted for."""
    privacy, planned = record["privacy"], record["plan"]["steps"]
    if record["logged"] != list(range(1, planned + 1)):
        raise Disagrees(f"metrics.jsonl has {len(record['logged'])} steps, not {planned} steps once and in order")
    for part in (privacy, privacy["spent"]):
        same(part, {"executed_steps": planned}, "privacy.json")
    return f"{planned} steps, each once; {privacy['replayed_steps']} were run again with the same noise"


def private(record: Record) -> str:
    """Check that `private` is true exactly for Poisson sampling, finite ε, noise, a secret key, and starting weights of
    such runs."""
    privacy, plan, config = record["privacy"], record["plan"], record["config"]
    if left := next(record["folder"].glob("checkpoint*"), None):
        raise Disagrees(f"{left.name} still exists, and may contain the noise key")
    public = config["debug.noise_seed"] is not None or config.get("data.public", False)
    secret = plan["noise_multiplier"] > 0.0 and not public
    same(record["seeds"], {"noise_seed": config["debug.noise_seed"], "noise_is_secret": secret}, "seeds.json")
    before = counted(privacy.get("earlier", []))
    epsilon, delta = total(before, plan["epsilon"], plan["delta"])
    if before:
        same(privacy["total"], {"epsilon": epsilon, "delta": delta}, "the total of the runs together")
    elif config.get("model.weights") is not None and "earlier" not in privacy:
        raise Disagrees("the run is from a version that did not account for its starting weights")
    expected = secret and plan["sampling"] == "poisson" and math.isfinite(epsilon)
    same({**privacy, **privacy["spent"]}, {"private": expected, "guaranteed": expected}, "privacy.json")
    return "the guarantee holds" if expected else "not private, and marked so"


def epsilon(record: Record) -> str:
    """Check that the reported ε is its accountant's bound, within the target, and agrees with dp_accounting."""
    plan, spent = record["plan"], record["privacy"]["spent"]
    claimed, sigma = float(spent["epsilon"]), plan["noise_multiplier"]
    if sigma == 0.0 and claimed == math.inf:
        return "no noise, and no finite epsilon is quoted"
    bounds = {"prv": spent["prv"]["upper"], "pld": spent["pld"], "rdp": spent["rdp"]}
    same(spent, {"delta": plan["delta"], "epsilon": bounds[plan["accountant"]]}, "privacy.json")
    if claimed > plan["epsilon"] * (1.0 + TIGHT):
        raise Disagrees(f"spent {claimed:.6g} is more than the target {plan['epsilon']:.6g}")
    upper = epsilon_pld(sigma, plan["expected_batch_size"] / plan["dataset_size"], plan["steps"], plan["delta"])
    words = f"{claimed:.4f} by {plan['accountant']}, {upper:.4f} by dp_accounting"
    if claimed < upper * (1.0 - LOOSE) or float(spent["prv"]["lower"]) * (1.0 - LOOSE) > upper:
        raise Disagrees(words)
    return words


def same(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Raise `Disagrees` for the first key of `expected` whose value in `found` differs (numbers: by more than 1e-9)."""
    for key, value in expected.items():
        own = float(found[key]) if found[key] == "inf" else found[key]
        numbers = {type(own), type(value)} <= {int, float}
        if not (math.isclose(own, value) if numbers else own == value):
            raise Disagrees(f"{where}: {key} is {own}, and should be {value}")


CHECKS: dict[str, Callable[[Record], str]] = {
    "configuration": configuration,
    "plan": plan_follows,
    "steps": steps,
    "private or not": private,
    "epsilon": epsilon,
}


def verify(folder: Path, names: Collection[str] = tuple(CHECKS)) -> dict[str, tuple[bool, str]]:
    """Return, for the name of each check, whether the finished run in `folder` passes it, and what was found.

    Raises:
        UserError: the folder has no finished run, or a run without training (`eval.shots`).
    """
    for name, why in (("DONE", "is not a finished run"), ("privacy.json", "did not train")):
        if not (folder / name).is_file():
            raise UserError(f"{folder} {why}, as it has no {name}: name another of results/runs.")
    found = {}
    for name in names:
        try:
            found[name] = True, CHECKS[name](read(folder))
        except Disagrees as problem:
            found[name] = False, str(problem)
        except Exception as error:  # entries of the record are missing or have the wrong type
            found[name] = False, f"it cannot be checked ({type(error).__name__}: {' '.join(str(error).split())})"
    return found


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. The exit code is 0 if all checks pass, 1 if one fails, 2 for a folder without a run."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.audit.reaccount", description=__doc__.split(":")[0])
    parser.add_argument("run", type=Path, help="the run's folder, results/runs/HASH")
    given = parser.parse_args(arguments)
    checks = verify(given.run)
    rows = [[name, "ok" if good else "FAILED", what] for name, (good, what) in checks.items()]
    print(markdown(["check", "result", "what was found"], rows))
    failed = [name for name, (good, _) in checks.items() if not good]
    print(f"\n{given.run}: " + (f"FAILED: {', '.join(failed)}" if failed else "all checks pass"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
