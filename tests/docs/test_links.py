"""Links in the documents, and names of documents in the source, are not broken."""

import re
from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, FENCE, ROOT, prose

CODE = [
    path
    for folder in ("src", "conf", "sweeps", "benchmarks", "trust", "analysis")
    for path in (ROOT / folder).rglob("*.*")
]
CODE = [path for path in CODE if path.suffix in (".py", ".yaml", ".j2", ".md")]


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def anchors(path: Path) -> list[str]:
    """All anchors of a document."""
    return [slug(heading) for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.M)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_are_not_broken(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = path if not name else (path.parent / name).resolve()
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_headings_have_unique_anchors(path: Path) -> None:
    if path.name != "CHANGELOG.md":  # every version has an "Added"
        assert len(anchors(path)) == len(set(anchors(path)))


def test_documents_that_code_and_messages_name_exist() -> None:
    for path in CODE:
        for name, anchor in re.findall(r"\b(docs/\w+\.md)(#[\w-]+)?", path.read_text()):
            assert (ROOT / name).is_file(), f"{path.relative_to(ROOT)} names {name}"
            assert not anchor or anchor[1:] in anchors(ROOT / name), f"{path.relative_to(ROOT)} names {name}{anchor}"


def test_every_document_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert not [path.name for path in DOCUMENTS[1:] if f"({path.relative_to(ROOT)})" not in readme]
    assert "docs/groupwise.svg" in readme


def test_files_named_in_prose_exist() -> None:
    """Paths such as `src/groupwise/…` and `tests/…` in backticks, and patterns, match existing files or folders."""
    for path in DOCUMENTS:
        for name in re.findall(r"`((?:src|conf|tests|sweeps|docs|scripts|benchmarks|trust)/[\w./*-]*)`", prose(path)):
            is_built = "/_build/" in name
            assert is_built or list(ROOT.glob(name.rstrip("/"))), f"{path.name} names {name}"


def test_life_of_a_batch_names_existing_files() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    walk = page.partition("\n## Life of a batch\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. (.*?)(?=^\d+\. |^\n|\Z)", walk, re.M | re.S)
    named = [re.findall(r"`([\w/]+\.py)`", step) for step in steps]
    assert len(steps) > 10 and all(named)
    assert not [name for step in named for name in step if not (ROOT / "src" / "groupwise" / name).is_file()]


def test_map_of_the_code_has_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = [path.parent.name for path in (ROOT / "src" / "groupwise").glob("*/__init__.py")]
    assert len(packages) > 10
    assert not [name for name in packages if f"`{name}/" not in page]
    table = page.partition("| in `src/groupwise/` | what is there |")[2].partition("\n\n")[0]
    assert not [name for name in re.findall(r"`(\w+/)`", table) if not (ROOT / "src" / "groupwise" / name).is_dir()]
