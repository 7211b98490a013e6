"""What a process of the benchmark is asked to run; importing this does not import torch."""

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
        """The workload's name in its rows."""
        return f"{self.workload} (tiny)" if self.tiny else self.workload
