"""Read text and JSON files, or say in one sentence why not."""

import json
from pathlib import Path
from typing import Any

from groupwise.errors import UserError, reason


def read_text(path: Path, advice: str) -> str:
    """Read a file as UTF-8, without a byte-order mark; `advice` says how to mend it when it is missing.

    Raises:
        UserError: no such file, or no UTF-8.
    """
    if not is_file(path):  # reading a pipe would wait for ever, and a device would never end
        raise UserError(f"{path} is missing; {advice}.")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); convert or replace the file.") from error
    except (OSError, MemoryError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}); make it readable.") from error


def is_file(path: Path) -> bool:
    """Is there an ordinary file? False too for a name that no file can have, and for links in a circle."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_json_list(path: Path, advice: str) -> list[dict[str, Any]]:
    """Read a JSON file that holds a list of objects, at least one.

    Raises:
        UserError: no such file, no JSON, or JSON of another form.
    """
    try:
        rows = json.loads(read_text(path, advice))
        json.dumps(rows, ensure_ascii=False).encode()
    except UserError:
        raise
    except UnicodeEncodeError as error:
        raise UserError(f"{path} holds half of a character (\\ud800 to \\udfff alone); mend or replace it.") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} is not JSON (line {error.lineno}: {error.msg}); it may be truncated, so replace it."
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:  # numbers of thousands of digits, thousands of brackets
        raise UserError(f"{path} is no JSON that can be read ({reason(error)}); replace it.") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} holds no list of objects, as the published file does; replace it.")
    return rows
