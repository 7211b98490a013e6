"""Networks of diffusers, small, from their classes: each predicts the noise of an example, or its picture again."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.torchvision_import import mend_torchvision
from trust.models.architecture import Architecture, Batch, Size, Subject, in_eval

UNET = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
AUTOENCODER = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
BLOCKS_OF_AUTOENCODER = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
HEADS = {"num_attention_heads": 4, "attention_head_dim": 4}
ON_LATENTS = {**HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "sample_size": 8}
PICTURE, LATENT = (3, 16, 16), (4, 8, 8)


def squares(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean squared error of each example, (B,)."""
    return (found - wanted).square().flatten(1).mean(1)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """(B,): everything but the target goes to the network; of what it returns, the first is the prediction."""
    inputs = {name: values for name, values in batch.items() if name != "target"}
    found = model(**inputs, return_dict=False)[0]
    return squares(found[:, : batch["target"].shape[1]], batch["target"])


def of(name: str, cls: str, batch: dict[str, Any], target: tuple[int, ...], **own: Any) -> Architecture:
    """A line of the list: a class of diffusers, the shapes of an example's inputs, its target's, and its arguments.

    An input whose shape is "time" is a step of the noise; one whose shape is a whole number n is a class below n.
    """

    def make(size: Size) -> Subject:
        mend_torchvision()  # diffusers imports transformers
        diffusers = importlib.import_module("diffusers")  # optional, so not in requirements.txt
        diffusers.logging.set_verbosity_error()  # of a cast by `to`

        network = getattr(diffusers, cls)(**own)
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = size.dropout
            elif getattr(module, "dropout_prob", 0):  # it leaves out the classes of a part of the examples
                in_eval(module)
        inputs = {key: _drawn(size, shape) for key, shape in batch.items()}
        return Subject(network, {**inputs, "target": size.vectors(*target)}, losses)

    return Architecture(name, "diffusers", make, needs="diffusers")


def _drawn(size: Size, shape: Any) -> Tensor:
    if shape == "time":
        return torch.randint(1, 1000, (size.batch,))
    return size.labels(shape) if isinstance(shape, int) else size.vectors(*shape)


NOISY = {"sample": PICTURE, "timestep": "time"}
TEXT = {"encoder_hidden_states": (6, 16)}
TOKENS = {"hidden_states": LATENT, "timestep": "time"}
DIFFUSERS = (
    of(
        "UNet of images",
        "UNet2DModel",
        NOISY,
        PICTURE,
        **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    of(
        "UNet, of a class",
        "UNet2DModel",
        {**NOISY, "class_labels": 3},
        PICTURE,
        **UNET,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        num_class_embeds=3,
    ),
    of(
        "UNet, of a text",
        "UNet2DConditionModel",
        {**NOISY, **TEXT},
        PICTURE,
        **{**UNET, "in_channels": 3, "out_channels": 3},
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
    ),
    of(
        "DiT",
        "DiTTransformer2DModel",
        {**TOKENS, "class_labels": 3},
        LATENT,
        **ON_LATENTS,
        norm_num_groups=4,
        num_embeds_ada_norm=1000,
    ),
    of(
        "PixArt",
        "PixArtTransformer2DModel",
        {**TOKENS, **TEXT},
        LATENT,
        **ON_LATENTS,
        norm_num_groups=4,
        cross_attention_dim=16,
        caption_channels=16,
        use_additional_conditions=False,
    ),
    of(
        "Transformer of latents",
        "Transformer2DModel",
        {"hidden_states": LATENT, **TEXT},
        LATENT,
        **HEADS,
        in_channels=4,
        num_layers=2,
        norm_num_groups=4,
        cross_attention_dim=16,
    ),
    of(
        "SD3",
        "SD3Transformer2DModel",
        {**TOKENS, **TEXT, "pooled_projections": (16,)},
        LATENT,
        **{**ON_LATENTS, "attention_head_dim": 8},
        patch_size=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    ),
    of(
        "AuraFlow",
        "AuraFlowTransformer2DModel",
        {**TOKENS, **TEXT},
        LATENT,
        **{**HEADS, "attention_head_dim": 8},
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        sample_size=8,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pos_embed_max_size=16,
    ),
    of(
        "Prior of text",
        "PriorTransformer",
        {"hidden_states": (16,), "timestep": "time", "proj_embedding": (16,), **TEXT},
        (16,),
        **HEADS,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=6,
        additional_embeddings=4,
    ),
    of(
        "Autoencoder of latents (KL)",
        "AutoencoderKL",
        {"sample": PICTURE},
        PICTURE,
        **AUTOENCODER,
        **BLOCKS_OF_AUTOENCODER,
    ),
    of(
        "Autoencoder of latents, tiny",
        "AutoencoderTiny",
        {"sample": PICTURE},
        PICTURE,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    of("VQ", "VQModel", {"sample": PICTURE}, PICTURE, **AUTOENCODER, **BLOCKS_OF_AUTOENCODER, num_vq_embeddings=12),
)
