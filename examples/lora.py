"""Trains LoRA adapters of a small Llama privately: clipping, noise and updates are for the adapters alone.

    python examples/lora.py        1,000 sequences at ε = 8, no download, in half a minute on one core

The base model has random weights, and each sequence counts up by 3. Put real weights and texts in their place.
"""

from typing import Any

import torch
import torch.nn.functional as F

import groupwise
from groupwise.torchvision_import import import_torchvision

import_torchvision()  # transformers asks for it, also where it is built for another torch
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

torch.manual_seed(0)
WORDS, LENGTH = 24, 12
texts = (torch.randint(WORDS, (1200, 1)) + 3 * torch.arange(LENGTH)) % WORDS
train, held_out = texts[:1000], texts[1000:]

sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, **sizes)
base = LlamaForCausalLM(config)
targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=32, lora_dropout=0.05, target_modules=targets))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]


def losses(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """One loss for each sequence, (b,): the mean over its own tokens."""
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


optimizer = torch.optim.AdamW(trained, lr=5e-3)
private = groupwise.make_private(model, optimizer, train, losses, epsilon=8, delta=1e-5, epochs=20, batch_size=200)
model.eval()  # without dropout
with torch.no_grad():
    before = losses(model, held_out).mean()
model.train()

for _ in private.steps():
    pass

model.eval()  # without dropout
with torch.no_grad():
    after = losses(model, held_out).mean()
print(private.statement())
print(f"epsilon {private.epsilon:.3f}, loss {before:.2f} before and {after:.2f} after")
