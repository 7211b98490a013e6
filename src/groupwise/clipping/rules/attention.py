"""Clips `nn.MultiheadAttention`, which is made of linear maps: by torch's own code, operation by operation.

torch hands `F.multi_head_attention_forward` over as a whole, before its code runs. Here the code runs, so that each of
the products in it is clipped by the rule of linear layers.
"""

from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from groupwise.clipping.per_example import in_place_of, refuse_unbatched

_OWN: Any = F.multi_head_attention_forward
_ITSELF = FunctionType(
    _OWN.__code__, _OWN.__globals__ | {"has_torch_function": lambda tensors: False}, argdefs=_OWN.__defaults__
)


@in_place_of(F.multi_head_attention_forward)
def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """What the function of torch computes, from the same arguments.

    Raises:
        UserError: an input without a batch.
    """
    for x in (query, key, value):
        refuse_unbatched("MultiheadAttention", x, 3)
    made: tuple[Tensor, Tensor | None] = _ITSELF(query, key, value, *args, **kwargs)
    return made
