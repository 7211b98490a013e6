"""Read text and JSON files, or say in one sentence why not."""

import json
from pathlib import Path
from typing import Any

from groupwise.errors import UserError


def read_text(path: Path, advice: str) -> str:
    """Read a file as UTF-8, without a byte-order mark; `advice` says how to mend it when it is missing.

    Raises:
        UserError: no such file, or no UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise UserError(f"{path} is missing; {advice}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); convert or replace the file.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable.") from error


def read_json_list(path: Path, advice: str) -> list[dict[str, Any]]:
    """Read a JSON file that holds a list of objects, at least one.

    Raises:
        UserError: no such file, no JSON, or JSON of another form.
    """
    try:
        rows = json.loads(read_text(path, advice))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} is not JSON (line {error.lineno}: {error.msg}); it may be truncated, so replace it."
        ) from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} holds no list of objects, as the published file does; replace it.")
    return rows
