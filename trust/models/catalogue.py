"""The catalogue holds every architecture of the table, in its order."""

from __future__ import annotations

from trust.models.adapters import ADAPTERS
from trust.models.architecture import Architecture
from trust.models.hugging_face import TEXT
from trust.models.hugging_face_senses import SENSES
from trust.models.plain_attention import ATTENTION
from trust.models.plain_layers import LAYERS
from trust.models.plain_mixing import MIXING
from trust.models.plain_networks import NETWORKS_OF_ONES_OWN
from trust.models.plain_recurrent import RECURRENT
from trust.models.torchvision_models import NETWORKS

ARCHITECTURES: tuple[Architecture, ...] = (
    *TEXT,
    *SENSES,
    *NETWORKS,
    *ADAPTERS,
    *LAYERS,
    *RECURRENT,
    *ATTENTION,
    *MIXING,
    *NETWORKS_OF_ONES_OWN,
)
