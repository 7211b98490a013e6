"""Builds the kit, with which a machine with a PyTorch image but no network can run `first_half_hour.sh`.

    python -m scripts.gpu.make_kit data=FOLDER

It writes parts of at most 60 MB to `out`, each a tar archive that can be unpacked by itself, and their SHA-256:

    code.tar     the last commit, with its git state              wheels.tar   packages that such an image lacks
    data-1.tar … CIFAR-10, in the layout that the project reads

Unpacked side by side they are the folders groupwise/, wheels/ and data/; `first_half_hour.sh` unpacks them itself.
Uncommitted changes are not in the kit. Only building the kit needs a network.
"""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import command, option, split
from groupwise.atomic import write_text
from groupwise.data.cifar10 import BATCHES_FOLDER, MOSAIC_FOLDER, MOSAIC_TEST, MOSAIC_TRAIN
from groupwise.errors import UserError
from groupwise.training.provenance import RECORDED, git_state

ROOT = Path(__file__).resolve().parents[2]
MOST = 60_000_000
"""The most bytes of a part, and of each file in it, for transfers with a size limit."""
PACKAGES = (
    *("hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.3", "hydra-submitit-launcher", "submitit", "cloudpickle"),
    *("prv-accountant", "dp-accounting", "dm-tree", "absl-py", "attrs", "wrapt"),
    *("rouge-score", "nltk", "sacrebleu", "portalocker", "tabulate", "colorama", "six"),
    *("opacus", "opt-einsum", "peft", "accelerate", "psutil", "tqdm"),
    *("pytest", "pluggy", "iniconfig", "pygments", "packaging"),
)
"""What an image with torch, numpy, scipy, pandas, pillow and transformers lacks; pinned by requirements.txt."""
SOURCE_ONLY = ("antlr4-python3-runtime", "rouge-score")
"""Pure Python packages published only as source; their wheels are built here, and fit every version."""
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")


@dataclass
class KitOptions:
    """The options of the command line."""

    data: str | None = option(None, "the folder with CIFAR-10 in it")
    python: str = option("3.12", "the Python version of the GPU machine")
    extra: str | None = option(None, "more packages, separated by commas")
    out: str = option("results/gpu-kit", "the folder for the parts")


def make(options: KitOptions) -> list[Path]:
    """Write all parts and `SHA256SUMS`; returns their paths.

    Raises:
        UserError: no CIFAR-10 in the folder, a file above `MOST`, or packages that cannot be downloaded.
    """
    if options.data is None:
        raise UserError("no data= was given: name the folder with CIFAR-10 in it, as paths.data of a run does.")
    files = cifar_files(Path(options.data).expanduser())
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.tar"):
        old.unlink()
    parts = [code(out / "code.tar")]
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder)
        download(wheels, options.python, split(options.extra or ""))
        parts.append(archive(out / "wheels.tar", ((file, f"wheels/{file.name}") for file in sorted(wheels.iterdir()))))
    for number, some in enumerate(in_parts(files), start=1):
        named = ((path, f"data/{name}") for name, path in some)
        parts.append(archive(out / f"data-{number}.tar", named))
    sums = "".join(f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts)
    write_text(out / "SHA256SUMS", sums)
    for part in parts:
        note = "" if part.stat().st_size <= MOST else f" (above {MOST / 1e6:.0f} MB: name fewer packages in extra=)"
        print(f"{part.stat().st_size / 1e6:8.1f} MB  {part}{note}")
    return parts


def cifar_files(root: Path) -> list[tuple[str, Path]]:
    """(name below the data folder, path) of the first layout of CIFAR-10 that the folder has.

    Raises:
        UserError: there is none, or files are missing.
    """
    folder = root / BATCHES_FOLDER
    if folder.is_dir():
        files = sorted(file for file in folder.iterdir() if file.is_file())
        return [(f"{BATCHES_FOLDER}/{file.name}", file) for file in files]
    names = [f"{MOSAIC_FOLDER}/{name}" for name in (*MOSAIC_TRAIN, MOSAIC_TEST)]
    if missing := [name for name in names if not (root / name).is_file()]:
        raise UserError(f"data={root} has no {BATCHES_FOLDER}/ and lacks {missing[0]}.")
    return [(name, root / name) for name in names]


def in_parts(files: Sequence[tuple[str, Path]]) -> list[list[tuple[str, Path]]]:
    """The files in their order, in parts of at most `MOST` bytes.

    Raises:
        UserError: a single file is larger.
    """
    parts: list[list[tuple[str, Path]]] = []
    room = 0
    for name, path in files:
        size = path.stat().st_size + 2 * tarfile.BLOCKSIZE
        if size > MOST - tarfile.RECORDSIZE:
            raise UserError(
                f"{path} has {size / 1e6:.0f} MB, more than a part of the kit ({MOST / 1e6:.0f}): give a data= folder "
                f"with {BATCHES_FOLDER}/ or the mosaics {MOSAIC_FOLDER}/*.webp."
            )
        if size > room:
            parts.append([])
            room = MOST - tarfile.RECORDSIZE
        parts[-1].append((name, path))
        room -= size
    return parts


def archive(path: Path, files: Iterable[tuple[Path, str]]) -> Path:
    """Write a tar of (file, name in it); returns its path."""
    with tarfile.open(path, "w") as tar_file:
        for file, name in files:
            tar_file.add(file, name, recursive=False)
    return path


def code(path: Path) -> Path:
    """Pack the last commit as groupwise/, with its git state for the provenance of runs."""
    tar = subprocess.run(["git", "-C", str(ROOT), "archive", "--prefix=groupwise/", "HEAD"], capture_output=True)
    if tar.returncode:
        raise UserError(f"git archive failed ({tar.stderr.decode().strip()}): make the kit in a checkout.")
    path.write_bytes(tar.stdout)
    state = {**git_state(ROOT), "dirty": False, "untracked": [], "diff": ""}  # the packed commit has no changes
    content = json.dumps(state).encode()
    with tarfile.open(path, "a") as tar_file:
        entry = tarfile.TarInfo(f"groupwise/{RECORDED}")
        entry.size = len(content)
        tar_file.addfile(entry, io.BytesIO(content))
    return path


def download(folder: Path, python: str, extra: Sequence[str]) -> None:
    """Fill a folder with wheels for that version of Python on Linux (x86-64).

    Raises:
        UserError: a package cannot be downloaded.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    pins = ["--constraint", str(ROOT / "requirements.txt"), "--no-deps"]
    wanted = [*PACKAGES, *extra]
    pure = [name for name in wanted if name.startswith(SOURCE_ONLY)]
    built = [name for name in wanted if not name.startswith(SOURCE_ONLY)]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    for action, names in (
        (["download", *target, "--dest", str(folder)], built),
        (["wheel", "--wheel-dir", str(folder)], pure),
    ):
        done = subprocess.run([*pip, *action, *pins, *names], capture_output=True, text=True)
        if done.returncode:
            why = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip())
            raise UserError(
                f"the wheels for Python {python} cannot be downloaded ({why}): correct that, or give another python=."
            )
    if bound := [
        file.name for file in folder.glob("*") if file.name.startswith("antlr4") and "-none-any" not in file.name
    ]:
        raise UserError(f"{bound[0]} is bound to this machine's Python: a pure wheel was expected.")


def print_made(options: KitOptions) -> None:
    """Build the kit, and print how to use it."""
    parts = make(options)
    total = sum(part.stat().st_size for part in parts) / 1e6
    print(f"{total:8.1f} MB in all. On the GPU machine, put the parts into one folder, unpack code.tar, and run")
    print("             bash groupwise/scripts/gpu/first_half_hour.sh 1     (then 2, 3 and 4)")


main = command(KitOptions, print_made)

if __name__ == "__main__":
    sys.exit(main())
