"""The kit for a machine without network: small parts with checksums, and wheels only of missing packages."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from groupwise.errors import UserError
from scripts.gpu import make_kit
from scripts.gpu.install import install, lacking
from scripts.gpu.make_kit import KitOptions, archive, cifar_files, code, in_parts, make

ROOT = Path(__file__).parents[2]


def mosaics(root: Path, size: int = 10) -> Path:
    (root / "cifar10").mkdir(parents=True)
    for name in ("train_shard0", "train_shard1", "train_shard2", "train_shard3", "train_shard4", "test"):
        (root / "cifar10" / f"{name}.webp").write_bytes(name.encode() * size)
    return root


def test_every_layout_of_cifar10_is_found(tmp_path: Path) -> None:
    found = [name for name, _ in cifar_files(mosaics(tmp_path / "a"))]
    assert found == [f"cifar10/train_shard{shard}.webp" for shard in range(5)] + ["cifar10/test.webp"]
    (tmp_path / "a" / "cifar-10-batches-py").mkdir()
    (tmp_path / "a" / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"1")
    assert [name for name, _ in cifar_files(tmp_path / "a")] == ["cifar-10-batches-py/data_batch_1"]
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match=r"has no cifar-10-batches-py/ and lacks cifar10/train"):
        cifar_files(tmp_path / "b")


def test_parts_are_small_complete_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_kit, "MOST", 40_000)
    files = cifar_files(mosaics(tmp_path, 900))
    parts = in_parts(files)
    assert [file for part in parts for file in part] == files and len(parts) > 1
    for number, part in enumerate(parts):
        packed = archive(tmp_path / f"{number}.tar", ((path, name) for name, path in part))
        assert packed.stat().st_size <= 40_000
        with tarfile.open(packed) as tar:
            for name, path in part:
                content = tar.extractfile(name)
                assert content is not None and content.read() == path.read_bytes()
    monkeypatch.setattr(make_kit, "MOST", 20_000)
    with pytest.raises(UserError, match="more than a part of the kit"):
        in_parts(files)


def test_kit_consists_of_parts_and_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def download(folder: Path, python: str, extra: list[str]) -> None:
        asked.append((python, extra))
        (folder / "one-1-py3-none-any.whl").write_bytes(b"wheel")

    monkeypatch.setattr(make_kit, "download", download)
    out = tmp_path / "kit"
    data = str(mosaics(tmp_path / "data"))
    names = [path.name for path in make(KitOptions(data=data, out=str(out), extra="scipy, pandas"))]
    assert names == ["code.tar", "wheels.tar", "data-1.tar"] and asked == [("3.12", ["scipy", "pandas"])]
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=out).returncode == 0
    with tarfile.open(out / "wheels.tar") as wheels:
        assert wheels.getnames() == ["wheels/one-1-py3-none-any.whl"]
    with pytest.raises(UserError, match="no data= was given"):
        make(KitOptions(out=str(out)))


def test_code_is_the_last_commit_with_its_git_state(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout, so there is no commit to pack")
    with tarfile.open(code(tmp_path / "code.tar")) as packed:
        packed.extractall(tmp_path, filter="data")
    state = json.loads((tmp_path / "groupwise" / "git-state.json").read_text())
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert state["sha"] == head and state["dirty"] is False
    assert (tmp_path / "groupwise" / "scripts" / "gpu" / "first_half_hour.sh").is_file()
    assert not list(tmp_path.glob("groupwise/results/gpu-kit"))


def wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", "")
        file.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{name}-1.0.dist-info/RECORD", "")


def test_installed_packages_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheels, target = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    wheel(wheels, "numpy")
    assert install(wheels, target) is None and not target.exists()
    wheel(wheels, "nothing_of_that_name")
    assert install(wheels, target) is None
    assert (target / "nothing_of_that_name").is_dir() and not (target / "numpy").exists()
    assert "nothing_of_that_name" in capsys.readouterr().out
    assert install(wheels, target) is None and not capsys.readouterr().out


def test_wheels_of_another_python_give_a_one_sentence_error(tmp_path: Path) -> None:
    wheel(tmp_path, "nothing_of_that_name")
    (tmp_path / "nothing_of_that_name-1.0-py3-none-any.whl").rename(
        tmp_path / "nothing_of_that_name-1.0-cp38-cp38-manylinux2014_x86_64.whl"
    )
    problem = install(tmp_path, tmp_path / "packages")
    version = ".".join(map(str, sys.version_info[:2]))
    assert problem is not None and problem.startswith(f"the kit's wheels do not fit Python {version} here (ERROR")
    assert problem.endswith(f"make it again with KIT=python={version}.")


def test_this_python_lacks_no_needed_module() -> None:
    assert lacking() == []
