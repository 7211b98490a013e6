"""Models of transformers, small, from their configurations, with random weights; and peft's adapters on two of them."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from groupwise.torchvision_import import mend_torchvision
from trust.models.architecture import Architecture, Batch, Size, Subject, classified, in_eval, tokens_classified

FAMILY = "transformers"


def configure(kind: str, size: Size, **own: Any) -> Any:
    """A small configuration; its dropouts are the size's, and whole layers are never dropped. None leaves a key out."""
    mend_torchvision()  # transformers imports it, and where it is broken only this import mends it
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()  # of kernels that are not installed, of tokens outside a small vocabulary
    common = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": 4,
        "intermediate_size": 2 * size.width,
        "max_position_embeddings": 2 * size.tokens + 4,
        "num_labels": 3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        "initializer_range": 0.1,
    }
    config = AutoConfig.for_model(
        kind, **{name: value for name, value in {**common, **own}.items() if value is not None}
    )
    set_dropout(config, size.dropout)
    return config


def set_dropout(config: Any, probability: float) -> None:
    """All dropouts of a configuration and of those inside it."""
    for name, value in vars(config).copy().items():
        if name.startswith("_"):
            continue
        if hasattr(value, "to_dict"):
            set_dropout(value, probability)
        elif re.search("layer_?drop$", name):
            setattr(config, name, 0.0)
        elif re.search("drop", name) and isinstance(value, float):
            setattr(config, name, probability)


def build_model(head: str, config: Any) -> nn.Module:
    """`AutoModelFor{head}` or a class of that name, with random weights."""
    import transformers

    automatic = getattr(transformers, f"AutoModelFor{head}", None)
    config._experts_implementation = "eager"  # the grouped product has no float64
    return automatic.from_config(config) if automatic else getattr(transformers, head)(config)


def values(size: Size, own: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of the list says, with functions of the size called."""
    return {name: value(size) if callable(value) else value for name, value in own.items()}


def classifier(name: str, kind: str, head: str = "SequenceClassification", **own: Any) -> Architecture:
    """Text with padding, one decision an example."""

    def make(size: Size) -> Subject:
        model = build_model(head, configure(kind, size, **values(size, own)))
        batch = {"input_ids": size.ids(), "attention_mask": size.mask, "labels": size.labels()}
        return Subject(model, batch, classifier_losses)

    return Architecture(name, FAMILY, make)


def classifier_losses(model: nn.Module, batch: Batch) -> Tensor:
    """(B,): everything but the labels goes to the model."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return classified(model(**inputs).logits, batch["labels"])


def causal(name: str, kind: str, positions: bool = False, padding: bool = True, **own: Any) -> Architecture:
    """Text with padding, the mean loss over each example's tokens; `positions`: ids of positions are given."""

    def make(size: Size) -> Subject:
        model = build_model("CausalLM", configure(kind, size, **values(size, own)))
        batch = {"input_ids": size.ids(), "attention_mask": size.mask}
        if positions:
            batch["position_ids"] = (size.mask.cumsum(1) - 1).clamp_min(0)
        return Subject(model, batch, causal_losses if padding else unpadded_losses)

    return Architecture(name, FAMILY, make)


def causal_losses(model: nn.Module, batch: Batch) -> Tensor:
    """(B,): each token from those before it."""
    logits = model(**batch, use_cache=False).logits
    return tokens_classified(logits[:, :-1], batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:])


def unpadded_losses(model: nn.Module, batch: Batch) -> Tensor:
    """(B,): the same, and the model is not told of padding."""
    logits = model(input_ids=batch["input_ids"]).logits
    return tokens_classified(logits[:, :-1], batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:])


def translator(name: str, kind: str, **own: Any) -> Architecture:
    """An encoder and a decoder, the mean loss over each example's target tokens."""

    def make(size: Size) -> Subject:
        layers = {"encoder_layers": size.depth, "decoder_layers": size.depth, "decoder_start_token_id": 1}
        model = build_model("Seq2SeqLM", configure(kind, size, **layers, **values(size, own)))
        batch = {"input_ids": size.ids(), "attention_mask": size.mask, "decoder_input_ids": size.ids()}
        return Subject(model, batch, translator_losses)

    return Architecture(name, FAMILY, make)


def translator_losses(model: nn.Module, batch: Batch) -> Tensor:
    """(B,): each target token from those before it."""
    logits = model(**batch, use_cache=False).logits
    return tokens_classified(logits[:, :-1], batch["decoder_input_ids"][:, 1:], batch["attention_mask"][:, 1:])


def width(times: float = 1) -> Any:
    """A multiple of the size's width."""
    return lambda size: int(times * size.width)


BOTH = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
BOTH |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), width(2))
TEXT = (
    classifier("BERT", "bert"),
    classifier("DistilBERT", "distilbert", hidden_dim=width(2)),
    classifier("RoBERTa", "roberta", pad_token_id=0),
    classifier("ALBERT", "albert", embedding_size=8),
    classifier("ELECTRA", "electra", embedding_size=8),
    classifier("DeBERTa-v2", "deberta-v2"),
    classifier("DeBERTa-v2, relative", "deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    classifier("XLNet", "xlnet", max_position_embeddings=None, d_inner=width(2), d_head=lambda s: s.width // 4),
    classifier(
        "Funnel",
        "funnel",
        num_hidden_layers=None,
        block_sizes=[1, 1],
        d_model=width(),
        n_head=2,
        d_head=8,
        d_inner=width(2),
    ),
    classifier("FNet (transformers)", "fnet"),
    classifier("MPNet", "mpnet"),
    classifier("ModernBERT", "modernbert", cls_token_id=1, sep_token_id=2),
    classifier("SqueezeBERT", "squeezebert", embedding_size=width()),
    translator("BART", "bart", d_model=width(), **BOTH),
    translator("T5", "t5", d_model=width(), d_kv=8, d_ff=width(2), num_layers=2, num_decoder_layers=2, num_heads=4),
    translator("Pegasus", "pegasus", d_model=width(), **BOTH),
    causal("GPT-2", "gpt2"),
    causal("GPT-2, position ids given", "gpt2", positions=True),
    causal("GPT-Neo", "gpt_neo", num_layers=2, attention_types=[[["global", "local"], 1]], window_size=4),
    causal("GPT-NeoX", "gpt_neox"),
    causal("GPT-J", "gptj", rotary_dim=4, n_embd=width(), n_layer=2, n_head=4, n_positions=lambda s: 2 * s.tokens),
    causal("OPT", "opt", ffn_dim=width(2), word_embed_proj_dim=width()),
    causal("BLOOM", "bloom"),
    causal("Llama", "llama", num_key_value_heads=2),
    causal("Mistral", "mistral", num_key_value_heads=2, sliding_window=4),
    causal("Qwen2", "qwen2", num_key_value_heads=2),
    causal("Qwen3", "qwen3", num_key_value_heads=2, head_dim=8),
    causal("Gemma", "gemma", num_key_value_heads=2, head_dim=8),
    causal("Gemma2", "gemma2", num_key_value_heads=2, head_dim=8, sliding_window=4),
    causal("Phi", "phi"),
    causal("Phi-3", "phi3", num_key_value_heads=2),
    causal("Falcon", "falcon"),
    causal("MPT", "mpt", d_model=width(), n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=lambda s: s.tokens),
    causal("Mixtral", "mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    causal("Mamba", "mamba", padding=False, state_size=4, time_step_rank=4),
    causal("RWKV", "rwkv", padding=False, attention_hidden_size=width(), context_length=lambda s: s.tokens),
)


LLAMA = ("q_proj", "v_proj")
GPT2 = ("c_attn", "c_proj")


def adapted(name: str, kind: str, config: str, **own: Any) -> Architecture:
    """A line of the list: the model below, the configuration's class in peft, and what it is given."""

    def make(size: Size) -> Subject:
        mend_torchvision()
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
    adapted("BOFT", "llama", "BOFTConfig", boft_block_size=4, boft_n_butterfly_factor=2, target_modules=LLAMA),
    adapted("SHiRA", "llama", "ShiraConfig", r=2, random_seed=0, target_modules=LLAMA),
    adapted("HRA", "llama", "HRAConfig", r=4, target_modules=LLAMA),
    adapted("RandLoRA", "llama", "RandLoraConfig", r=4, target_modules=LLAMA),
    adapted("C3A", "llama", "C3AConfig", block_size=8, target_modules=LLAMA),
    adapted("RoAd", "llama", "RoadConfig", group_size=8, target_modules=LLAMA),
    adapted("MiSS", "llama", "MissConfig", r=4, target_modules=LLAMA),
    adapted("DeLoRA", "llama", "DeloraConfig", r=4, target_modules=LLAMA),
    adapted("GraLoRA", "llama", "GraloraConfig", r=4, target_modules=LLAMA),
    adapted("HiRA", "llama", "HiraConfig", r=4, target_modules=LLAMA),
    adapted(
        "Trainable tokens",
        "llama",
        "TrainableTokensConfig",
        token_indices=[*range(3, 20)],
        target_modules=["embed_tokens"],
    ),
    adapted("Llama-Adapter", "llama", "AdaptionPromptConfig", adapter_len=4, adapter_layers=2),
)
