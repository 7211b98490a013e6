"""Checks a finished run from its own record:  python -m groupwise.audit.reaccount results/runs/HASH

Recomputes epsilon by two libraries, checks that plan, noise, steps and flags follow from the
configuration, and compares hashes. It only reads, and recomputes every figure that it can; it cannot detect a folder
whose files were all forged consistently.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from groupwise.audit.reaccount import accounts
from groupwise.audit.reaccount import record as files
from groupwise.audit.reaccount.record import FAILED, CannotTell, Check, Disagrees, Record, equal, perform, same
from groupwise.checkout import CHECKOUT
from groupwise.errors import command
from groupwise.rows import markdown
from groupwise.training.checkpoint import load_checkpoint
from groupwise.training.earlier_runs import counted, total
from groupwise.training.provenance import git_state
from groupwise.training.record import sha256_of


def from_config(record: Record) -> str:
    """N, B, T, δ, ε or σ, r, sampling and accountant follow from the configuration."""
    config, plan = record.config, record.plan
    size = record.json("data")["train_examples"]
    batch = config["train.batch_size"]
    if batch is None:
        batch = max(1, round(config["train.sample_rate"] * size))
    steps = config["train.steps"] or max(1, round(config["train.epochs"] * size / batch))
    clipped, adaptive = config["clip.grouping"] != "none", config["clip.policy"] == "adaptive"
    expected: dict[str, Any] = {
        "dataset_size": size,
        "expected_batch_size": batch,
        "steps": steps,
        "delta": size**-1.1 if config["privacy.delta"] is None else config["privacy.delta"],
        "quantile_budget": config["clip.quantile_budget"] if clipped and adaptive else 0.0,
        "sampling": config["privacy.sampling"],
        "accountant": config["privacy.accountant"],
        "adjacency": "add_remove",
    }
    if not clipped:
        expected |= {"epsilon": math.inf, "noise_multiplier": 0.0}
    elif config["privacy.noise_multiplier"] is None:
        expected["epsilon"] = config["privacy.epsilon"]
    else:
        expected["noise_multiplier"] = config["privacy.noise_multiplier"]
    same(plan, expected, "the plan", "what follows from config.yaml")
    return f"N = {size}, B = {batch:g}, T = {steps}, delta = {plan['delta']:.3g}, {plan['sampling']}"


def scales(record: Record) -> str:
    """σ_b = σ√(K/4r), σ_new = σ/√(1 - r), and so 1/σ_new² + K/4σ_b² = 1/σ²."""
    plan = record.plan
    sigma, groups, share = plan["noise_multiplier"], plan["num_groups"], plan["quantile_budget"]
    if sigma == 0.0:
        same(plan, {"count_noise_multiplier": 0.0, "gradient_noise_multiplier": 0.0}, "the plan", "no noise")
        return "no noise, and the plan says so"
    count = sigma * math.sqrt(groups / (4.0 * share)) if share else 0.0
    expected = {"count_noise_multiplier": count, "gradient_noise_multiplier": sigma / math.sqrt(1.0 - share)}
    same(plan, expected, "the plan", f"sigma = {sigma:.6g} with K = {groups}, r = {share:g}")
    return f"sigma {sigma:.5g}, sigma_b {count:.5g}, sigma_new {expected['gradient_noise_multiplier']:.5g}"


def thresholds(record: Record) -> str:
    """One positive C_k for each of K groups, with √(ΣC_k²) = C unless they move freely."""
    config, values = record.config, list(record.json("privacy")["thresholds"].values())
    if config["clip.grouping"] == "none":
        if values:
            raise Disagrees(f"nothing is clipped, but there are {len(values)} thresholds")
        return "nothing is clipped"
    if len(values) != record.plan["num_groups"]:
        raise Disagrees(f"{len(values)} thresholds, and the plan has K = {record.plan['num_groups']} groups")
    if not all(0.0 < value < math.inf for value in values):
        raise Disagrees("a threshold is not finite and positive")
    norm = math.sqrt(sum(value**2 for value in values))
    if not _norm_is_known(config, len(values)):
        return f"K = {len(values)}; they move, and their norm is {norm:.4g} now"
    if not math.isclose(norm, config["clip.threshold"], rel_tol=1e-6):
        raise Disagrees(f"√(ΣC_k²) is {norm:.6g}, and config.yaml has clip.threshold {config['clip.threshold']:g}")
    return f"K = {len(values)}, √(ΣC_k²) = {norm:.4g} = C"


def noise_norms(record: Record) -> str:
    """The noise of every step has the norm that σ_new, S, B and the number D of parameters make: σ_new·‖C‖·√D/B."""
    config, plan = record.config, record.plan
    logged = [line["noise_norm"] for line in record.metrics if "noise_norm" in line]
    if plan["gradient_noise_multiplier"] == 0.0:
        if any(logged):
            raise Disagrees("the plan has no noise, and metrics.jsonl has some")
        return "no noise"
    if len(logged) != plan["steps"]:
        raise Disagrees(f"{len(logged)} steps were noised, of {plan['steps']}")
    if not _norm_is_known(config, plan["num_groups"]):
        raise CannotTell("the thresholds move, and only the last are recorded")
    if config["noise.allocation"] == "equal_budget" and plan["num_groups"] > 1:
        raise CannotTell("noise=equal_budget depends on the size of each group, which is not recorded")
    if config.get("parallel.kind") == "fsdp" and config.get("parallel.ranks", 1) > 1:
        raise CannotTell("each shard logs the norm of its own noise")
    unit = plan["gradient_noise_multiplier"] * config["clip.threshold"] / plan["expected_batch_size"]
    sizes = [(value / unit) ** 2 for value in logged]
    if not all(math.isclose(size, round(sizes[0]), rel_tol=1e-6) for size in sizes):
        raise Disagrees(
            f"noise_norm is not sigma_new·C·√D/B with one D: it makes D {min(sizes):.6g} to {max(sizes):.6g}"
        )
    path = record.folder / "model.pt"
    if path.is_file() and config["model.trains"] == "all" and config["model.name"] == "wide_resnet":
        weights = load_checkpoint(path)
        count = sum(tensor.numel() for tensor in weights.values())
        if count != round(sizes[0]):
            raise Disagrees(f"noise_norm makes D = {round(sizes[0])} parameters, and model.pt has {count}")
    return f"{len(logged)} steps, D = {round(sizes[0])} parameters"


def private(record: Record) -> str:
    """`private` is true exactly for Poisson samples, finite ε, noise, a secret key, and weights that had these too."""
    privacy, seeds, plan, config = record.json("privacy"), record.json("seeds"), record.plan, record.config
    same(seeds, {"seed": config["seed"], "noise_seed": config["debug.noise_seed"]}, "seeds.json", "config.yaml")
    noised = plan["noise_multiplier"] > 0.0
    secret = noised and config["debug.noise_seed"] is None and not config.get("data.public")
    if seeds["noise_is_secret"] is not secret:
        raise Disagrees(
            f"seeds.json says noise_is_secret = {seeds['noise_is_secret']}, and config.yaml makes it {secret}"
        )
    before = counted(privacy.get("earlier", []), config["task"], record.json("data"))
    epsilon, delta = total(before, plan["epsilon"], plan["delta"])
    if before:
        same(privacy["total"], {"epsilon": epsilon, "delta": delta}, "total", "the budgets of the runs together")
    elif config.get("model.weights") is not None and "earlier" not in privacy:
        raise CannotTell("the run is older than the account of the weights that it started from")
    expected = secret and plan["sampling"] == "poisson" and math.isfinite(epsilon)
    for where, value in (("private", privacy["private"]), ("spent.guaranteed", privacy["spent"]["guaranteed"])):
        if value is not expected:
            raise Disagrees(f"privacy.json says {where} = {value}, and the run makes it {expected}")
    return "private: the guarantee holds" if expected else "not private, and stamped so"


def steps(record: Record) -> str:
    """Every step from 1 to T was logged once, in order, and is what was accounted for."""
    privacy, planned = record.json("privacy"), record.plan["steps"]
    logged = [line["step"] for line in record.metrics if "learning_rate" in line]
    if logged != list(range(1, planned + 1)):
        wrong = next((i for i, step in enumerate(logged, 1) if i != step), len(logged) + 1)
        raise Disagrees(f"metrics.jsonl has {len(logged)} steps of {planned}, the first that is out of order: {wrong}")
    last = record.metrics[-1]
    if last["step"] != planned or "learning_rate" in last:
        raise Disagrees("metrics.jsonl does not end with the evaluation after the last step")
    executed = {"executed_steps": privacy["executed_steps"], "spent.executed_steps": privacy["spent"]["executed_steps"]}
    for where, value in executed.items():
        if not equal(value, planned):
            raise Disagrees(f"privacy.json says {where} = {value}, and {planned} steps were logged")
    replayed = privacy["replayed_steps"]
    if not isinstance(replayed, int) or replayed < 0:
        raise Disagrees(f"privacy.json says replayed_steps = {replayed!r}")
    return f"{planned} steps, each once; {replayed} of them were run again after an interruption, with the same noise"


def _norm_is_known(config: dict[str, Any], groups: int) -> bool:
    return config["clip.policy"] != "adaptive" or (bool(config["clip.rescale"]) and groups > 1)


def data(record: Record) -> str:
    """The SHA-256 of every data file in data.json that is still there."""
    listed: dict[str, Any] = record.json("data").get("sha256") or {}
    if not listed:
        raise CannotTell("the examples were made up on the spot or come with a package: data.json names no file")
    root = record.data or Path(str(record.config["paths.data"])).expanduser()
    found = {name: path for name in listed if (path := _find(root, name)) is not None}
    for name, path in found.items():
        if sha256_of(path) != listed[name]:
            raise Disagrees(f"{path} is not the {name} that the run read")
    if len(found) < len(listed):
        absent = next(name for name in listed if name not in found)
        rest = f"; the other {len(found)} files are those of the run" if found else ""
        raise CannotTell(f"{absent} is not in {root}{rest}")
    return f"{len(found)} files in {root} are those of the run"


def code(record: Record) -> str:
    """The commit is known to this checkout, and there were no uncommitted changes."""
    git, here = record.json("git"), git_state()
    if git["sha"] is None:
        raise CannotTell("the run was not made in a checkout")
    if here["sha"] is None:
        raise CannotTell(f"commit {git['sha'][:12]}; this is no checkout, so nothing says whether it is known")
    asked = ["git", "-C", str(CHECKOUT), "cat-file", "-e", f"{git['sha']}^{{commit}}"]
    known = subprocess.run(asked, capture_output=True)
    if known.returncode != 0:
        raise CannotTell(f"commit {git['sha'][:12]} is not in this checkout")
    if git["dirty"]:
        changed = "diff.patch has them" if (record.folder / "diff.patch").is_file() else "git.json names the files"
        raise CannotTell(f"commit {git['sha'][:12]} with changes that were not committed: {changed}")
    now = "the one here" if here["sha"] == git["sha"] and not here["dirty"] else f"here it is {here['sha'][:12]}"
    return f"commit {git['sha'][:12]}, clean; {now}{' with changes' if here['dirty'] else ''}"


def _find(root: Path, name: str) -> Path | None:
    """The file below `root`; of what is given as a single file, that file. Nothing outside of `root` is looked at."""
    path = root if root.is_file() and root.name == name else root / name
    inside = path.resolve().is_relative_to(root.resolve())
    return path if inside and path.is_file() else None


CHECKS: dict[str, Callable[[Record], str]] = {
    "files": files.sums,
    "configuration": files.config_hash,
    "result row": files.row,
    "key of the noise": files.no_key,
    "plan follows from the configuration": from_config,
    "noise scales": scales,
    "thresholds": thresholds,
    "noise of every step": noise_norms,
    "steps": steps,
    "private or not": private,
    "quoted epsilon": accounts.claim,
    "epsilon by dp_accounting": accounts.by_dp_accounting,
    "epsilon by prv_accountant": accounts.by_prv_accountant,
    "data": data,
    "code": code,
}
UNTRAINED = ("files", "configuration", "result row", "key of the noise", "data", "code")
"""The checks of a run that trained nothing (`eval.shots`)."""


def verify(folder: Path, data: Path | None = None, names: Collection[str] = tuple(CHECKS)) -> list[Check]:
    """The checks of that name of the finished run in `folder`; `data` is where its data lie now.

    Raises:
        UserError: that is no finished run.
    """
    record = Record.open(folder, data)
    chosen = [name for name in CHECKS if name in names]
    try:
        untrained = record.in_context
    except (OSError, ValueError, TypeError, AttributeError):
        untrained = False  # the checks themselves will say what is wrong with config.yaml
    if untrained:
        chosen = [name for name in chosen if name in UNTRAINED]
    return [perform(name, CHECKS[name], record) for name in chosen]


@command
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0 all right, 1 a check failed, 2 no finished run."""
    parser = argparse.ArgumentParser(
        prog="python -m groupwise.audit.reaccount", description=(__doc__ or "").split("\n")[0].split(":")[0] + "."
    )
    parser.add_argument("run", type=Path, help="the run's folder, results/runs/HASH")
    parser.add_argument("--data", type=Path, help="where its data are, if not where the run had them")
    given = parser.parse_args(arguments)
    checks = verify(given.run, given.data)
    print(markdown(["check", "result", "what was found"], [[c.name, c.result, c.detail] for c in checks]))
    failed = [check.name for check in checks if check.result == FAILED]
    print(f"\n{given.run}: " + (f"FAILED: {', '.join(failed)}" if failed else "nothing is wrong with it"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
