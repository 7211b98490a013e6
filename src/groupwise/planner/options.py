"""The planner's options, and checks of their combinations."""

from dataclasses import dataclass

from groupwise.errors import UserError
from groupwise.options import option
from groupwise.planner.accelerators import ACCELERATORS, Accelerator


@dataclass
class PlanOptions:
    """The options of the command line."""

    model: str = option("gpt3_175b", "gpt3_175b, opt_66b, opt_175b, gpt2_xl, llama_7b, or a folder with a config.json")
    devices: int = option(16, "number of stages, each on its own device")
    accelerator: str = option("a100_80gb", f"one of {', '.join(ACCELERATORS)}", among=tuple(ACCELERATORS))
    memory: float | None = option(None, "memory of a device in GB (1e9 bytes); default: that of the accelerator")
    microbatch: int | None = option(None, "examples in a microbatch; default: the fastest that fits")
    length: int = option(900, "tokens of the longest example of a batch, to which all are padded")
    batch: int = option(128, "examples in a logical batch")
    examples: int = option(14732, "number of training examples (default: SAMSum)")
    epochs: float = option(5.0, "passes over the training set")
    rank: int = option(32, "rank of the adapters (LoRA); 0 trains all parameters", zero=True)
    dtype: str | None = option(
        None, "dtype of frozen weights and activations; default: that of the accelerator", among=("bfloat16", "float32")
    )
    rematerialize: bool = option(True, "keep only each block's input, and recompute the block in the backward pass")

    def __post_init__(self) -> None:
        for key, most in (("batch", "examples"), ("microbatch", "batch")):
            if (getattr(self, key) or 0) > getattr(self, most):
                raise UserError(f"{key}={getattr(self, key)} is more than {most}={getattr(self, most)}; give less.")
        if self.dtype is not None and not self.rank:
            raise UserError(f"rank=0 trains all parameters in float32, so dtype={self.dtype} has no effect: omit it.")
        device = self.device
        if self.weights_dtype not in device.peak:
            raise UserError(
                f"dtype={self.weights_dtype} has no known speed on a {device.name}; give {' or '.join(device.peak)}."
            )

    @property
    def device(self) -> Accelerator:
        """The accelerator of that name."""
        return ACCELERATORS[self.accelerator]

    @property
    def room(self) -> float:
        """Bytes available to tensors on a device."""
        memory = self.device.memory if self.memory is None else 1e9 * self.memory
        return max(0.0, memory - self.device.reserved)

    @property
    def weights_dtype(self) -> str:
        """The dtype of frozen weights and activations, or of all weights, by torch's name."""
        return self.dtype or (next(iter(self.device.peak)) if self.rank else "float32")
