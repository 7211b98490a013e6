"""Small language models: their shapes, a tokeniser of sixty words, and folders that hold them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.schema import ModelConfig
from groupwise.torchvision_import import import_torchvision

WORDS = 60
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 24},
    "roberta": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 26,
        "type_vocab_size": 1,
    },
}
SHAPES["bert"] = SHAPES["roberta"]


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed each test, so that it does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A tokeniser of sixty words, five of them special: <s> 0, <pad> 1, </s> 2."""
    import_torchvision()
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{i}" for i in range(WORDS - len(SPECIAL)))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=inner, **dict(zip(names, SPECIAL, strict=True)))


@pytest.fixture
def fresh() -> Callable[..., ModelConfig]:
    """Settings of a small model with random weights."""

    def make(architecture: str, **changes: Any) -> ModelConfig:
        return ModelConfig(**{"fresh": True, "architecture": architecture, "shape": SHAPES.get(architecture)} | changes)

    return make


@pytest.fixture(scope="session")
def folders(tokenizer, tmp_path_factory) -> dict[str, Path]:
    """Pretrained models in half precision: a causal GPT-2, a masked RoBERTa and a masked BERT."""
    import transformers

    from groupwise.models.hub import make_config

    root = tmp_path_factory.mktemp("pretrained")
    for name, kind in (("gpt2", "CausalLM"), ("roberta", "MaskedLM"), ("bert", "MaskedLM")):
        config = make_config(ModelConfig(fresh=True, architecture=name, shape=SHAPES[name]), tokenizer)
        getattr(transformers, f"AutoModelFor{kind}").from_config(config).half().save_pretrained(root / name)
    return {name: root / name for name in ("gpt2", "roberta", "bert")}
