"""Writes a small decoder of a recent family, with random weights and the family's kind of tokeniser, to a folder.

    python examples/small_decoder.py FOLDER llama        or qwen2, qwen3, gemma, gemma2, gemma3_text

Rotary positions, RMSNorm and grouped queries are the family's own code. The tokens that begin, end and pad a text, and
the head that is tied to the token embedding are like the published models'. The texts are made up.
"""

import sys
from dataclasses import dataclass
from typing import Any

from groupwise.data.synthetic_text import synthetic_labelled, synthetic_paired
from groupwise.torchvision_import import import_torchvision

import_torchvision()  # transformers asks for it, also where it is built for another torch
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402


@dataclass(frozen=True)
class Family:
    """The tokens that begin, end and pad a text, None where there is none."""

    begin: str | None
    end: str
    pad: str | None


LLAMA = Family("<|begin_of_text|>", "<|end_of_text|>", None)
QWEN = Family(None, "<|endoftext|>", "<|endoftext|>")
GEMMA = Family("<bos>", "<eos>", "<pad>")
FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "qwen2": (QWEN, {}),
    "qwen3": (QWEN, {"head_dim": 8}),
    "gemma": (GEMMA, {"head_dim": 8}),
    "gemma2": (GEMMA, {"head_dim": 8, "sliding_window": 16}),
    "gemma3_text": (
        GEMMA,
        {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def make_tokenizer(family: Family, size: int = 512) -> Any:
    """Byte-pair encoding on bytes; the family's first token goes before every text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = dict.fromkeys(token for token in (family.pad, family.end, family.begin) if token)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    pairs, reviews = synthetic_paired("e2e").train[:400], synthetic_labelled("sst2").train.texts[:400]
    inner.train_from_iterator([*(" ".join(pair) for pair in pairs), *(text for text, _ in reviews)], trainer)
    if family.begin:
        first = (family.begin, inner.token_to_id(family.begin))
        inner.post_processor = processors.TemplateProcessing(f"{first[0]} $A", f"{first[0]} $A {first[0]} $B", [first])
    tokens = {"bos_token": family.begin, "eos_token": family.end, "pad_token": family.pad}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **tokens)


def write(folder: str, name: str, **shape: Any) -> None:
    """Write the tokeniser, config.json and model.safetensors of a `name` of two layers; `shape` changes its sizes."""
    family, own = FAMILIES[name]
    tokenizer = make_tokenizer(family)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 8,  # rows to spare, as the published models have
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id if family.pad != family.end else None,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes | own | shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write(*sys.argv[1:3])
