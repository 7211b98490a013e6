"""Parses the documents into blocks of code, commands and links.

A block is fenced by three backticks and a language, and may have a mark: an HTML comment on the line before.

| language | mark | tested by |
|---|---|---|
| python | none | it runs, in its own namespace; `<!-- slow -->` marks one that takes long |
| bash | none | every line is a command that exists and composes; nothing runs |
| text | `<!-- printed by: COMMAND -->` | the command prints it (test_outputs.py) |
| any | `<!-- file: PATH -->`, `<!-- edit: PATH -->` | a recipe step: writes or edits a file (test_recipes.py) |
| bibtex | | not run: the citation of the paper |
| console | `<!-- run -->` | a recipe step: runs in a copy |
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
RECIPE = ("file: ", "edit: ", "run")


@dataclass(frozen=True)
class Block:
    """One fenced block: its place, its mark without comment brackets, its language and its text."""

    document: str
    line: int
    mark: str
    language: str
    text: str

    @property
    def is_recipe(self) -> bool:
        """Whether it is a step of a recipe."""
        return self.mark.startswith(RECIPE)

    @property
    def name(self) -> str:
        """The id of its test case."""
        return f"{self.document}-{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks, or those of these languages, in the order of the documents."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(path.name, line, match["mark"] or "", match["language"], match["text"]))
    return [block for block in found if not languages or block.language in languages]


def prose(path: Path) -> str:
    """A document without its blocks."""
    return FENCE.sub("", path.read_text())


def commands() -> list[tuple[str, str]]:
    """(where, command): each line of a bash block, and each `code` in prose that begins like one of our commands."""
    found = [
        (block.name, line.strip())
        for block in blocks("bash")
        if not block.is_recipe
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    for path in DOCUMENTS:
        quoted = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(path))
        found += [(path.name, code) for code in quoted if re.match(r"python (-m \w|run\.py)|make [a-z]", code)]
    return sorted(set(found))
