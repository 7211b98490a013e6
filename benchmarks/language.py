"""The language-model workloads: RoBERTa, GPT-2 and Llama shapes with fresh weights, and LoRA on the last two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.tasks.samples import IGNORED
from groupwise.torchvision_import import import_torchvision_first

TINY = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 97}
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop")
"""The names of dropout rates in the configurations of RoBERTa and GPT-2; Llama has none."""


@dataclass
class Built:
    """A model, its batch (names -> tensors, batch first) and a function for the per-example losses (B,)."""

    model: nn.Module
    batch: dict[str, Tensor]
    losses: Callable[[nn.Module, dict[str, Tensor]], Tensor]


def configure(kind: str, layers: int, tiny: bool, **own: Any) -> Any:
    """The configuration of a kind of model without dropout, with its `own` sizes or tiny ones."""
    import_torchvision_first()
    from transformers import AutoConfig

    sizes = {"num_hidden_layers": layers, **own, **(TINY if tiny else {})}
    return AutoConfig.for_model(kind, bos_token_id=0, eos_token_id=0, **dict.fromkeys(DROPOUTS, 0.0), **sizes)


def roberta(batch: int, layers: int, tokens: int, tiny: bool) -> Built:
    """RoBERTa-base for two classes (`tiny`: width 48)."""
    positions = {"max_position_embeddings": 514, "type_vocab_size": 1}
    config = configure("roberta", layers, tiny, vocab_size=50265, layer_norm_eps=1e-5, pad_token_id=1, **positions)
    from transformers import RobertaForSequenceClassification

    data = {
        "input_ids": torch.randint(3, config.vocab_size, (batch, tokens)),
        "position_ids": torch.arange(2, tokens + 2).repeat(batch, 1),
        "token_type_ids": torch.zeros(batch, tokens, dtype=torch.long),
        "labels": torch.randint(0, 2, (batch,)),
    }
    return Built(RobertaForSequenceClassification(config), data, _classification)


def decoder(config: Any, batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> Built:
    """A language model and random tokens; the label of a token is the next one."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, config.vocab_size, (batch, tokens))
    data = {
        "input_ids": ids,
        "position_ids": torch.arange(tokens).repeat(batch, 1),
        "labels": torch.cat([ids[:, 1:], torch.full((batch, 1), IGNORED)], dim=1),
    }
    return Built(AutoModelForCausalLM.from_config(config, dtype=dtype), data, _next_token)


def gpt2(batch: int, layers: int, tokens: int, tiny: bool, *, tied: bool) -> Built:
    """GPT-2 (`tiny`: width 48); `tied`: the head is the token embedding."""
    return decoder(configure("gpt2", layers, tiny, tie_word_embeddings=tied), batch, tokens)


def lora_gpt2(batch: int, layers: int, tokens: int, tiny: bool) -> Built:
    """Tied GPT-2, all frozen but LoRA of rank 16 on the four Conv1D of each block (`tiny`: rank 4)."""
    built = gpt2(batch, layers, tokens, tiny, tied=True)
    return _with_adapters(built, 4 if tiny else 16, ("c_attn", "c_proj", "c_fc"))


def lora_gpt2_xl(batch: int, layers: int, tokens: int, tiny: bool) -> Built:
    """Tied GPT-2-xl frozen in bfloat16, and float32 LoRA of rank 32 on the attention's inputs (`tiny`: rank 4)."""
    config = configure("gpt2", layers, tiny, hidden_size=1600, num_attention_heads=25)
    built = decoder(config, batch, tokens, torch.bfloat16)
    return _with_adapters(built, 4 if tiny else 32, ("c_attn",))


def llama(batch: int, layers: int, tokens: int, tiny: bool) -> Built:
    """A Llama of SmolLM2-135M's shape: 9 heads share 3 keys and values, tied head (`tiny`: width 48)."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "vocab_size": 49152}
    shared = {"num_key_value_heads": 2 if tiny else 3, "tie_word_embeddings": True}
    return decoder(configure("llama", layers, tiny, **sizes, **shared), batch, tokens)


def lora_llama(batch: int, layers: int, tokens: int, tiny: bool) -> Built:
    """The same Llama, all frozen but LoRA of rank 16 on the seven linear layers of each block (`tiny`: rank 4)."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return _with_adapters(llama(batch, layers, tokens, tiny), 4 if tiny else 16, targets)


def _with_adapters(built: Built, rank: int, targets: Sequence[str]) -> Built:
    """Freeze the model and add adapters (alpha = rank) to the layers named in `targets`."""
    import peft

    network: Any = built.model
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        target_modules=list(targets),
        fan_in_fan_out=network.config.model_type == "gpt2",  # its Conv1D
    )
    built.model = peft.get_peft_model(network, config)
    for name, parameter in built.model.named_parameters():
        if "lora_B" in name:  # they start at 0, and then no gradient reaches lora_A
            nn.init.normal_(parameter, std=0.02)
    return built


def _classification(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def _next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over an example's T - 1 predicted tokens; the labels are already shifted, so no logits are copied."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    labels = batch["labels"]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape).sum(1) / (labels.shape[1] - 1)
