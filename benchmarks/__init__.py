"""Measures speed and memory; `docs/benchmarks.md` shows the results."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # silences torch's profiler, which measures memory
