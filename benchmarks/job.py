"""The job of a benchmark process; importing this module does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One method on one workload, in one memory format."""

    workload: str
    method: str
    memory_format: str = "contiguous"
    batch: int | None = None
    layers: int | None = None
    tokens: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    tiny: bool = False

    @property
    def named(self) -> str:
        """The name of the workload in the result rows."""
        return f"{self.workload} (tiny)" if self.tiny else self.workload
