"""Missing packages, full disks and missing permissions end a command with one sentence and exit code 2."""

from errno import EFBIG, ENOSPC
from pathlib import Path

import pytest

from groupwise.errors import MISTAKE, UserError, command, environment_errors


def test_a_missing_package_is_named_with_the_extra_that_installs_it() -> None:
    message = r"^This needs sacrebleu, which is not installed.*pip install 'groupwise\[language\]'"
    with pytest.raises(UserError, match=message), environment_errors():
        raise ModuleNotFoundError("No module named 'sacrebleu.metrics'", name="sacrebleu.metrics")
    with pytest.raises(ModuleNotFoundError), environment_errors():
        raise ModuleNotFoundError("No module named 'groupwise.x'", name="groupwise.x")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(30, "Read-only file system", "results/tables/cifar.md"), "error: results/tables/cifar.md: Read-only"),
        (OSError(ENOSPC, "No space left on device"), "error: the disk: No space left on device"),
        (OSError(EFBIG, "File too large"), "error: the disk: File too large"),
        (PermissionError(13, "Permission denied", "a"), "error: a: Permission denied"),
        (UserError("a sentence."), "error: a sentence."),
    ],
)
def test_an_error_is_one_sentence(error: Exception, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    @command
    def main() -> int:
        raise error

    assert main() == MISTAKE
    assert capsys.readouterr().err.startswith(words)


def test_a_bug_in_a_command_keeps_its_traceback(tmp_path: Path) -> None:
    @command
    def main() -> int:
        raise OSError("no file is named")

    with pytest.raises(OSError, match="no file is named"):
        main()
