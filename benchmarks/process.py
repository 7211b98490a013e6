"""A worker process seen from the driver: questions, answers, and what became of it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.job import Job

ROOT = Path(__file__).resolve().parents[1]


class Process:
    """`benchmarks.worker` for one job, alive until `close`; also a context manager.

    An answer that does not come within `limit` seconds ends the process; every later question is answered with the
    same ``{"refused": …}``.
    """

    def __init__(self, job: Job, limit: float) -> None:
        self.job, self._limit = job, limit
        self._failure: dict[str, Any] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        threads = str(job.threads)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "src"), *filter(None, [environment.get("PYTHONPATH")])]
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", job.dump()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; failures are answers too."""
        if self._failure is None:
            try:
                return self._ask(request)
            except (BrokenPipeError, EOFError):
                self._failure = {"refused": self._death()}
            except TimeoutError:
                self._failure = {"refused": f"no answer within {self._limit:g} s"}
            self.close()
        return self._failure

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], self._limit)[0]:
            raise TimeoutError
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise EOFError
        return json.loads(line)

    def _death(self) -> str:
        code = self._process.wait()
        if code == -9:
            return "killed by the system, probably out of memory"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"ended with exit code {code}: {lines[-1] if lines else 'it said nothing'}"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._errors.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
