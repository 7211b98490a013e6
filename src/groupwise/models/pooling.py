"""The mean over a text's tokens in place of its first token, for encoders too small to gather a text in one place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from groupwise.errors import UserError


class MeanPooled(nn.Module):
    """`model.pool=mean`: a classifier of transformers whose head reads the mean over the tokens that are no padding.

    The model's own head is used as it is, on that mean in the place of the first token. Called as the model is; what it
    returns has `logits` (B, classes).

    Raises:
        UserError: the model's head is not one that reads the first token's features, as RoBERTa's is.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        head = getattr(model, "classifier", None)
        if not type(head).__name__.endswith("ClassificationHead"):
            raise UserError(f"model.pool=mean is for heads such as RoBERTa's, and {type(model).__name__} has another.")
        self.model = model

    def forward(self, attention_mask: Tensor, **inputs: Any) -> SimpleNamespace:
        """Logits from `attention_mask` (B, T) and the model's other inputs."""
        states = self.model.base_model(attention_mask=attention_mask, **inputs).last_hidden_state
        kept = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
        return SimpleNamespace(logits=self.model.classifier(mean))
