"""Installs missing packages from a folder of wheels, without network access, and reports what is still missing.

    python scripts/gpu/install.py WHEELS TARGET      install wheels of packages that this Python lacks into TARGET
    python scripts/gpu/install.py check              exit code 2 if a package that a run needs is missing

It runs before all other code, so it imports only the standard library.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

NEEDED = (
    "torch",
    "numpy",
    "scipy",
    "pandas",
    "yaml",
    "tqdm",
    "PIL",
    "hydra",
    "omegaconf",
    "prv_accountant",
    "dp_accounting",
    "pytest",
)
"""Modules that the steps need."""


def install(wheels: Path, target: Path) -> str | None:
    """Install the wheels of missing packages into `target`; returns an error message of one sentence, or None."""
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if not (_installed(wheel) or _in_target(wheel, target))]
    if not missing:
        return None
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    done = subprocess.run([*command, "--target", str(target), *map(str, missing)], capture_output=True, text=True)
    if done.returncode == 0:
        print(f"installed into {target}: {', '.join(wheel.name.split('-')[0] for wheel in missing)}")
        return None
    message = (done.stderr.strip().splitlines() or ["no message from pip"])[0]
    version = ".".join(map(str, sys.version_info[:2]))
    return f"the kit's wheels do not fit Python {version} here ({message}): make it again with KIT=python={version}."


def lacking() -> list[str]:
    """Modules of `NEEDED` that cannot be found."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def _installed(wheel: Path) -> bool:
    try:
        importlib.metadata.distribution(wheel.name.split("-")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _in_target(wheel: Path, target: Path) -> bool:
    name, version = wheel.name.split("-")[:2]
    return (target / f"{name}-{version}.dist-info").is_dir()


def main(arguments: list[str]) -> int:
    """The command line; returns its exit code."""
    if arguments == ["check"]:
        names = lacking()
        if names:
            print(f"error: this Python has no {', '.join(names)}: name them in extra= of the kit.", file=sys.stderr)
        return 2 if names else 0
    problem = install(Path(arguments[0]), Path(arguments[1]))
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
