"""Makes pytest note who covers which line, or run chosen tests, best first, for the mutation score."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import coverage
import pytest


class Coverage:
    """Runs all tests once; notes each test's outcome, its seconds, and the lines of the package that it reaches."""

    def __init__(self, source: Path, data: Path) -> None:
        self.source = source
        self.coverage = coverage.Coverage(data_file=str(data), source=[str(source)], config_file=False)
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Book the lines that run now to this test."""
        self.coverage.switch_context(item.nodeid)
        begin = time.process_time()
        result = yield
        self.seconds[item.nodeid] += time.process_time() - begin
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note who fails or is skipped without any mutant: it can kill none."""
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)

    def save(self, file: Path) -> None:
        """Write the tests of every line; ["import"] for a line that runs as the file is imported."""
        self.coverage.stop()
        data = self.coverage.get_data()
        lines: dict[str, dict[str, list[str]]] = {}
        for name in data.measured_files():
            contexts = data.contexts_by_lineno(name)
            lines[str(Path(name).relative_to(self.source.parent))] = {
                str(line): ["import"] if "" in tests else sorted(set(tests) - self.failed)
                for line, tests in contexts.items()
            }
        seconds = {test: spent for test, spent in self.seconds.items() if test not in self.failed}
        file.write_text(json.dumps({"seconds": seconds, "failed": sorted(self.failed), "lines": lines}))


class Chosen:
    """Runs only ``tests``, in that order, and writes the first one that fails into ``file``."""

    def __init__(self, tests: Sequence[str], file: Path) -> None:
        self.rank = {test: rank for rank, test in enumerate(tests)}
        self.file = file

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop the others."""
        items[:] = sorted((item for item in items if item.nodeid in self.rank), key=lambda i: self.rank[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name the killer."""
        if report.failed:
            self.file.write_text(report.nodeid)
