"""Installs what this Python lacks from a folder of wheels, without a network, and says what is still missing.

    python scripts/gpu/install.py WHEELS TARGET      packages that this Python has are left as they are
    python scripts/gpu/install.py check              exit code 2 where one is missing that a run needs

It runs before anything else does, so it imports nothing beyond the standard library.
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
)
"""Modules without which no step runs."""


def install(wheels: Path, target: Path) -> str | None:
    """Unpack the wheels of packages that are not there into `target`; returns what went wrong, in a sentence."""
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if not (_there(wheel) or _unpacked(wheel, target))]
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
    said = (done.stderr.strip().splitlines() or ["pip said nothing"])[0]
    version = ".".join(map(str, sys.version_info[:2]))
    return f"the kit's wheels do not fit Python {version} here ({said}): make it again with KIT=python={version}."


def lacking() -> list[str]:
    """Modules of `NEEDED` that cannot be found."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def _there(wheel: Path) -> bool:
    try:
        importlib.metadata.distribution(wheel.name.split("-")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _unpacked(wheel: Path, target: Path) -> bool:
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
