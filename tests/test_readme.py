"""What README and docs/ show is true: snippets run, commands compose, targets and links exist."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import torch

from groupwise.launch.compose import compose_run, register
from groupwise.launch.sweep import check_sweep
from groupwise.privacy import make_plan

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"<!-- executed by tests/test_readme\.py(: slow)? -->\n```python\n(.*?)```", re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def snippets() -> list[object]:
    """Every marked block of Python but the slow one, which has a test of its own."""
    return [
        pytest.param(code, id=f"{path.name}-{number}")
        for path in DOCUMENTS
        for number, (slow, code) in enumerate(MARK.findall(path.read_text()))
        if not slow
    ]


def commands() -> list[str]:
    """Every command in the documents that begins with ``python run.py``, without comments."""
    found = []
    for path in DOCUMENTS:
        found += re.findall(r"^python run\.py[^\n`#]*|(?<=`)python run\.py[^`]*(?=`)", path.read_text(), re.MULTILINE)
    return sorted({command.strip() for command in found})


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


@cache  # each calibrates a noise multiplier
def execute(code: str) -> str:
    """Run a snippet in a namespace of its own; what it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed), torch.random.fork_rng(devices=[]):
        exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("code", snippets())
def test_snippets_run(code: str) -> None:
    execute(code)


def test_the_library_snippets_of_the_readme_are_short_and_the_private_one_keeps_its_budget() -> None:
    codes = [code for _, code in MARK.findall((ROOT / "README.md").read_text())]
    assert len(codes) == 2
    for code in codes:
        assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert "privacy" not in codes[0]
    printed = execute(codes[1])
    epsilon, accuracy = (float(number) for number in re.findall(r"(?:epsilon|accuracy) ([\d.]+)", printed))
    assert 2.9 < epsilon <= 3
    assert accuracy > 0.8


def test_the_readme_shows_the_statement_of_the_demo() -> None:
    plan = make_plan(
        dataset_size=1433,
        expected_batch_size=256,
        steps=168,
        epsilon=8,
        delta=1e-5,
        num_groups=21,
        quantile_budget=0.01,
    )
    assert plan.statement() in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_errata_quotes_what_its_script_prints() -> None:
    text = (ROOT / "docs" / "errata.md").read_text()
    (code,) = [code for slow, code in MARK.findall(text) if slow]
    printed = re.findall(r"(?:real|=[^:]*:|:) ?([\d. ]+)$", execute(code), re.MULTILINE)
    numbers = {number for line in printed for number in line.split()} - {"1.00", "3.00", "8.00"}
    assert len(numbers) == 11
    told = MARK.sub("", text)
    assert not [number for number in numbers if number not in told and number[:-1] not in told]


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=[pytest.mark.slow] if "+sweep=" in command else []) for command in commands()],
)
def test_commands_compose(command: str) -> None:
    arguments = [re.sub(r"<\w+>", "x", part) for part in shlex.split(command)[2:]]
    if "--help" in arguments:
        return
    if "--cfg" in arguments:
        place = arguments.index("--cfg")
        assert arguments[place + 1] == "job"
        del arguments[place : place + 2]
    if "-m" in arguments:
        arguments.remove("-m")
        register()
        one_will_do = any(argument.startswith("hydra/launcher=") for argument in arguments)
        assert check_sweep(arguments, CONF) >= (1 if one_will_do else 2)
    else:
        compose_run(arguments, CONF)


def test_commands_are_found() -> None:
    assert "python run.py task=cifar clip=adaptive_layer scale=demo" in commands()
    assert any(" -m " in command for command in commands())


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z0-9_%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    patterns = [re.compile(target.replace("%", "[a-z0-9_]+")) for target in targets]
    named = {name for path in DOCUMENTS for name in re.findall(r"`make ([a-z0-9_-]+)", path.read_text())}
    assert {"demo", "test"} <= named
    assert not [name for name in named if not any(pattern.fullmatch(name) for pattern in patterns)]


def test_sweeps_named_after_make_exist() -> None:
    named = {name for path in DOCUMENTS for name in re.findall(r"make (?:sweep)-([a-z0-9_]+)", path.read_text())}
    assert named
    assert not [name for name in named if not (ROOT / "sweeps" / f"{name}.yaml").is_file()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text())):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = path if not name else (path.parent / name).resolve()
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text()), re.MULTILINE)
            assert anchor in map(slug, headings), target


def test_every_document_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"docs/{path.name}" in readme for path in DOCUMENTS[1:])
    assert "docs/groupwise.svg" in readme
