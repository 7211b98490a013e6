"""The output that the documents show is what the commands print."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, Block, blocks

PRINTED = [block for block in blocks("text") if block.mark.startswith("printed by: ")]
VARIABLE = re.compile(r"(accuracy) [\d.]+|(  in) \d+ s|(\.(?:py|yaml)):\d+")
"""Output that depends on the noise, the machine, or the line numbers of a file."""


@cache
def printed(command: str, folder: Path) -> str:
    """The output of a command, with results in a separate folder."""
    program, *arguments = command.split()
    assert program == "python"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    arguments += [f"paths.results={folder / 'results'}"] if arguments[0] == "run.py" else []
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.replace(f"{folder}/", "")


@pytest.mark.slow
@pytest.mark.parametrize("block", PRINTED, ids=lambda block: block.name)
def test_shown_output_is_printed(block: Block, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "shown"
    output = VARIABLE.sub(r"\1\2\3", printed(block.mark.removeprefix("printed by: "), folder))
    for line in block.text.splitlines():
        assert VARIABLE.sub(r"\1\2\3", line) in output.splitlines(), line
