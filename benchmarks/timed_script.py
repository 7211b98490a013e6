"""Runs a script as it stands, and tells what its training loop took:  python -m benchmarks.timed_script < script.py

The loop is the script's one `for` statement on the top level. What stands before it (imports, data, model, the search
for the noise) and after it (evaluation, the account) is not on the clock. The answer is a line of JSON, the last.
"""

import json
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def split(source: str) -> tuple[str, str, str]:
    """The script before its loop, the loop, and the rest.

    Raises:
        ValueError: it has no loop on the top level, or several.
    """
    parts = re.split(r"^(for .*\n(?:[ \t].*\n|\n)+)", source, flags=re.MULTILINE)
    if len(parts) != 3:
        raise ValueError(f"a script with one loop was expected, and this one has {len(parts) // 2}")
    return parts[0], parts[1], parts[2]


def lines(source: str) -> dict[str, int]:
    """Lines of code, without docstring, comments and blank lines: of the loop and of the whole script."""

    def count(text: str) -> int:
        stripped = [line.strip() for line in text.splitlines()]
        return sum(1 for line in stripped if line and not line.startswith("#"))

    before, loop, after = split(source)
    whole = re.sub(r'\A""".*?"""', "", before, flags=re.DOTALL) + loop + after
    return {"loop_lines": count(loop), "script_lines": count(whole)}


def timed(source: str) -> dict[str, Any]:
    """Run it; processor and wall seconds of its loop, and by how many bytes memory grew in it at most (Linux; else
    None)."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    parts = [compile(part, "script", "exec") for part in split(source)]
    exec(parts[0], namespace)
    with suppress(OSError):
        REFS.write_text("5")  # the peak so far is forgotten
    resident, processor, wall = _memory("VmRSS"), time.process_time(), time.perf_counter()
    exec(parts[1], namespace)
    seconds = {"cpu_seconds": time.process_time() - processor, "wall_seconds": time.perf_counter() - wall}
    peak = _memory("VmHWM")
    exec(parts[2], namespace)
    grown = None if peak is None or resident is None else peak - resident
    return {**seconds, "peak_bytes": grown}


def _memory(name: str) -> int | None:
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


if __name__ == "__main__":
    print(json.dumps(timed(sys.stdin.read())))
