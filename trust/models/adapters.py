"""Adapters of peft on a small Llama or GPT-2: only the adapters train."""

from typing import Any

from groupwise.data.cifar10 import import_torchvision
from trust.models.architecture import Architecture, Size, Subject, in_eval
from trust.models.hugging_face import build_model, causal_losses, configure, values, width

LLAMA = ("q_proj", "v_proj")
GPT2 = ("c_attn", "c_proj")


def adapted(name: str, kind: str, config: str, **own: Any) -> Architecture:
    """A line of the list: the model below, the configuration's class in peft, and what it is given."""

    def make(size: Size) -> Subject:
        import_torchvision()
        import peft

        settings = values(size, own)
        if config in ("LoraConfig", "AdaLoraConfig"):
            settings["lora_dropout"] = size.dropout
        chosen = getattr(peft, config)(task_type="CAUSAL_LM", **settings)
        below = build_model(
            "CausalLM", configure(kind, size, **({"num_key_value_heads": 4} if kind == "llama" else {}))
        )
        model = peft.get_peft_model(below, chosen)  # type: ignore[arg-type]
        for module in model.modules():
            if getattr(module, "module_dropout", None):  # at rate 0 it draws one number for the batch all the same
                in_eval(module)
        return Subject(model, {"input_ids": size.ids(), "attention_mask": size.mask}, _losses(config))

    return Architecture(name, "peft", make)


def _losses(config: str) -> Any:
    """Prompts stand before the tokens, so that their logits are left out."""

    def losses(model: Any, batch: Any) -> Any:
        class Cut:
            def __call__(self, **inputs: Any) -> Any:
                output = model(**inputs)
                output.logits = output.logits[:, -batch["input_ids"].shape[1] :]
                return output

        return causal_losses(Cut(), batch)  # type: ignore[arg-type]

    return losses


ADAPTERS = (
    adapted("LoRA on Llama", "llama", "LoraConfig", r=4, target_modules=LLAMA),
    adapted("LoRA on GPT-2", "gpt2", "LoraConfig", r=4, target_modules=GPT2, fan_in_fan_out=True),
    adapted("LoRA with biases", "gpt2", "LoraConfig", r=4, target_modules=GPT2, fan_in_fan_out=True, bias="all"),
    adapted("LoRA with a trained head", "llama", "LoraConfig", r=4, target_modules=LLAMA, modules_to_save=["lm_head"]),
    adapted("LoRA on embeddings", "llama", "LoraConfig", r=4, target_modules=("q_proj", "embed_tokens")),
    adapted("DoRA", "llama", "LoraConfig", r=4, target_modules=LLAMA, use_dora=True),
    adapted("rsLoRA", "llama", "LoraConfig", r=4, target_modules=LLAMA, use_rslora=True),
    adapted(
        "IA3",
        "llama",
        "IA3Config",
        target_modules=("k_proj", "v_proj", "down_proj"),
        feedforward_modules=("down_proj",),
    ),
    adapted("AdaLoRA", "llama", "AdaLoraConfig", init_r=4, target_r=2, total_step=10, target_modules=LLAMA),
    adapted("VeRA", "llama", "VeraConfig", r=4, target_modules=LLAMA),
    adapted("LoHa", "llama", "LoHaConfig", r=4, target_modules=LLAMA),
    adapted("LoKr", "llama", "LoKrConfig", r=4, target_modules=LLAMA),
    adapted("OFT", "llama", "OFTConfig", oft_block_size=4, r=0, target_modules=LLAMA),
    adapted("FourierFT", "llama", "FourierFTConfig", n_frequency=20, target_modules=LLAMA),
    adapted("LN tuning", "llama", "LNTuningConfig", target_modules=("input_layernorm", "norm")),
    adapted("Prompt tuning", "llama", "PromptTuningConfig", num_virtual_tokens=4),
    adapted("Prefix tuning", "llama", "PrefixTuningConfig", num_virtual_tokens=4),
    adapted(
        "Prefix tuning, projected",
        "gpt2",
        "PrefixTuningConfig",
        num_virtual_tokens=4,
        prefix_projection=True,
        encoder_hidden_size=width(),
    ),
    adapted("P-tuning", "llama", "PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=width()),
    adapted(
        "P-tuning, LSTM",
        "llama",
        "PromptEncoderConfig",
        num_virtual_tokens=4,
        encoder_hidden_size=width(),
        encoder_reparameterization_type="LSTM",
    ),
)
