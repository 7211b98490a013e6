"""The privacy arguments of a Trainer, and the `TrainingArguments` that are refused because they cannot be private."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import transformers
from transformers import TrainingArguments

from groupwise.config.keys import OURS
from groupwise.errors import UserError, did_you_mean


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class PrivacyArguments:
    """Arguments of `groupwise.make_private`, for `transformers.HfArgumentParser`.

    The number of steps and the batch size follow from `TrainingArguments`. In Python, ``clip`` may also be a partition
    of the model's layers or a `groupwise.config.schema.ClipConfig`.
    """

    epsilon: float | None = _option(None, "The privacy budget; give this or --noise_multiplier.")
    noise_multiplier: float | None = _option(None, "Sigma, the noise in units of the sensitivity; in place of epsilon.")
    delta: float | None = _option(None, "Delta of (epsilon, delta); by default N^-1.1 for N training examples.")
    clip: str = _option("adaptive_layer", "flat, ghost, fixed_layer, fixed_block, or adaptive_flat, _layer, _block.")
    threshold: float = _option(1.0, "The norm that one example's whole gradient is clipped to.")
    noise: str = _option("global", "How the groups share the noise: global, equal_budget or weighted.")
    accountant: str = _option("prv", "The accountant: prv, pld or rdp.")
    target_quantile: float | None = _option(None, "Adaptive: the share of examples that should not be clipped.")
    quantile_learning_rate: float | None = _option(None, "Adaptive: the learning rate of the thresholds.")
    quantile_budget: float | None = _option(None, "Adaptive: the share of the budget that the counts take.")
    initial_threshold: float | None = _option(None, "Adaptive: the first threshold of each group.")
    rescale: bool | None = _option(None, "Adaptive: rescale all thresholds to the norm --threshold.")
    secure_noise: bool = _option(False, "Draw noise and batches from a cipher, on a lattice (on the CPU, slower).")

    @classmethod
    def of(cls, given: "PrivacyArguments | Mapping[str, Any]") -> "PrivacyArguments":
        """The arguments from an instance or a mapping; raises `UserError` for an unknown name, with the right one."""
        if isinstance(given, PrivacyArguments):
            return given
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                raise UserError(f"privacy has no argument {name!r}{did_you_mean(OURS.get(name, name), known)}.")
        return cls(**given)

    def settings(self) -> dict[str, Any]:
        """The given arguments of `make_private`, which ``secure_noise`` is not."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "secure_noise"}


OFF: tuple[Any, ...] = (None, False, 0, "", {}, [])
SUPPORTED: dict[str, tuple[Any, ...]] = {
    # These sum or scale gradients before the noise.
    **dict.fromkeys(("fp16", "deepspeed", "fsdp", "parallelism_config"), OFF),
    "n_gpu": (0, 1),
    "world_size": (1,),
    **dict.fromkeys(("torch_compile", "use_liger_kernel"), OFF),  # not tested, or joins layers that are clipped
    "neftune_noise_alpha": OFF,  # scaled by the padded length, which depends on other examples
    "auto_find_batch_size": OFF,  # would train again, at the cost of another epsilon
    "dataloader_drop_last": OFF,
    "include_num_input_tokens_seen": (False, "no"),  # reveals the lengths of the drawn examples
    "enable_jit_checkpoint": OFF,  # may save between the noise and the count of a step
    "optim": ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"),
    "train_sampling_strategy": ("random",),
}
"""Arguments of which some values are refused, and the values that are known to be private."""
INSTEAD = {"n_gpu": "set CUDA_VISIBLE_DEVICES=0", "world_size": "start one process, without torchrun"}


def check_arguments(args: TrainingArguments) -> None:
    """Raise a `UserError` for what cannot be private; set ``max_grad_norm`` to 0, with a warning if it was given."""
    for name, values in SUPPORTED.items():
        value = getattr(args, name)
        if value not in values:
            do = INSTEAD.get(name, "leave it out" if values is OFF else f"give one of {', '.join(map(str, values))}")
            shown = getattr(value, "value", value)  # of an enum
            raise UserError(f"{name}={shown} breaks the guarantee, or was never tested with it: {do}.")
    if args.max_grad_norm and args.max_grad_norm != TrainingArguments.max_grad_norm:  # not the default
        transformers.utils.logging.get_logger(__name__).warning(
            f"max_grad_norm={args.max_grad_norm:g} is set to 0, because each example's gradient is clipped instead of "
            f"their sum. To set that norm, use PrivacyArguments(threshold={args.max_grad_norm:g})."
        )
    args.max_grad_norm = 0.0


SETTINGS = (
    "learning_rate", "label_smoothing_factor", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim",
    "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "train_sampling_strategy",
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs",
)  # fmt: skip
"""Fields of `TrainingArguments` that affect the weights. A resumed run repeats its noise, so they must not change."""
WATCHING = ("reduce_lr_on_plateau", "greedy")
"""Schedulers whose learning rates depend on evaluations, so that these fields affect the weights too."""
WATCHED = ("metric_for_best_model", "greater_is_better", "eval_strategy", "eval_steps")
