"""Models of transformers that see and hear, and those that take several inputs an example."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trust.models.architecture import Architecture, Batch, Size, Subject, classified, tokens_classified
from trust.models.hugging_face import FAMILY, build_model, classifier_losses, configure, set_dropout, values, width


def seeing(name: str, kind: str, head: str = "ImageClassification", **own: Any) -> Architecture:
    """Images, one decision each."""

    def make(size: Size) -> Subject:
        pixels = {"image_size": size.image, "patch_size": 8, "vocab_size": None, "max_position_embeddings": None}
        config = configure(kind, size, **{**pixels, **values(size, own)})
        batch = {"pixel_values": size.images(), "labels": size.labels()}
        return Subject(build_model(head, config), batch, classifier_losses)

    return Architecture(name, FAMILY, make)


class Pooled(nn.Module):
    """A tower of CLIP with a linear classifier on its pooled output."""

    def __init__(self, tower: nn.Module, features: int) -> None:
        super().__init__()
        self.tower, self.head = tower, nn.Linear(features, 3)

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.head(self.tower(**inputs).pooler_output)


def pooled_losses(model: nn.Module, batch: Batch) -> Tensor:
    """(B,): everything but the labels goes to the tower."""
    return classified(model(**{name: t for name, t in batch.items() if name != "labels"}), batch["labels"])


def clip_config(size: Size) -> Any:
    """Both towers, small."""
    both = {"hidden_size": size.width, "intermediate_size": 2 * size.width, "num_hidden_layers": size.depth}
    both |= {"num_attention_heads": 4, "projection_dim": size.width}
    text = {**both, "vocab_size": size.vocabulary, "max_position_embeddings": size.tokens, "eos_token_id": 2}
    own: dict[str, Any] = {"text_config": text, "vision_config": {**both, "image_size": size.image, "patch_size": 8}}
    own |= {"projection_dim": size.width, "initializer_range": None}
    plain = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = configure("clip", size, **own, **dict.fromkeys((*plain, "max_position_embeddings", "use_cache")))
    set_dropout(config, size.dropout)
    return config


def clip_text(size: Size) -> Subject:
    """The text tower; the token of the end is the last of each example."""
    model = Pooled(build_model("CLIPTextModel", clip_config(size).text_config), size.width)
    ids = size.ids().clamp_min(3)
    ids[torch.arange(size.batch), size.lengths - 1] = 2
    return Subject(model, {"input_ids": ids, "attention_mask": size.mask, "labels": size.labels()}, pooled_losses)


def clip_vision(size: Size) -> Subject:
    """The image tower."""
    model = Pooled(build_model("CLIPVisionModel", clip_config(size).vision_config), size.width)
    return Subject(model, {"pixel_values": size.images(), "labels": size.labels()}, pooled_losses)


def clip_contrastive(size: Size) -> Subject:
    """Both, and each image against the texts of the whole batch: the examples mix."""
    model = build_model("CLIPModel", clip_config(size))
    ids = size.ids().clamp_min(3)
    ids[torch.arange(size.batch), size.lengths - 1] = 2

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(**batch).logits_per_image
        return F.cross_entropy(logits, torch.arange(len(logits)), reduction="none")

    return Subject(model, {"input_ids": ids, "attention_mask": size.mask, "pixel_values": size.images()}, losses)


def whisper(size: Size) -> Subject:
    """Speech to text: two convolutions, an encoder, a decoder with a head tied to its embedding."""
    own: dict[str, Any] = {
        "d_model": size.width,
        "encoder_layers": size.depth,
        "decoder_layers": size.depth,
        "num_mel_bins": 8,
    }
    own |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 2 * size.width}
    own |= {"decoder_ffn_dim": 2 * size.width, "max_source_positions": size.tokens, "decoder_start_token_id": 1}
    own |= {"max_target_positions": size.tokens, "max_position_embeddings": None}
    model = build_model("WhisperForConditionalGeneration", configure("whisper", size, **own))
    sound = size.vectors(8, 2 * size.tokens)

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(input_features=batch["sound"], decoder_input_ids=batch["ids"], use_cache=False).logits
        return tokens_classified(logits[:, :-1], batch["ids"][:, 1:], batch["mask"][:, 1:])

    return Subject(model, {"sound": sound, "ids": size.ids(), "mask": size.mask}, losses)


def hearing(name: str, kind: str, **own: Any) -> Architecture:
    """Raw sound, one decision an example."""

    def make(size: Size) -> Subject:
        layers: dict[str, Any] = {"conv_dim": [size.width] * 2, "conv_kernel": [8, 4], "conv_stride": [4, 2]}
        layers |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
        unused = {"max_position_embeddings": None, "apply_spec_augment": False}
        model = build_model("AudioClassification", configure(kind, size, **layers, **unused, **values(size, own)))
        batch = {"input_values": size.vectors(16 * size.tokens), "labels": size.labels()}
        return Subject(model, batch, classifier_losses)

    return Architecture(name, FAMILY, make)


def multiple_choice(size: Size) -> Subject:
    """Three texts an example, folded into the batch inside the model."""
    model = build_model("MultipleChoice", configure("bert", size))
    ids = torch.stack([size.ids() for _ in range(3)], 1)
    mask = size.mask[:, None].expand(-1, 3, -1).contiguous()
    return Subject(model, {"input_ids": ids, "attention_mask": mask, "labels": size.labels()}, classifier_losses)


def siamese(size: Size) -> Subject:
    """One BERT called twice in a forward pass; the cosine of both outputs is regressed."""
    model = build_model("BertModel", configure("bert", size))
    batch = {"left": size.ids(), "right": size.ids(), "mask": size.mask, "target": torch.rand(size.batch)}

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        both = [model(input_ids=batch[side], attention_mask=batch["mask"]).pooler_output for side in ("left", "right")]
        return (F.cosine_similarity(*both) - batch["target"]).square()

    return Subject(model, batch, losses)


def of(name: str, make: Callable[[Size], Subject], mixes: bool = False) -> Architecture:
    """A line of the list that has a function of its own."""
    return Architecture(name, FAMILY, make, mixes)


IN_STAGES: dict[str, Any] = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"))
"""Keys that models with stages of several widths do not have."""
SENSES = (
    of("BERT for multiple choice", multiple_choice),
    of("BERT, siamese", siamese),
    seeing("ViT (transformers)", "vit"),
    seeing("DeiT", "deit", "DeiTForImageClassification"),
    seeing("BEiT", "beit", use_relative_position_bias=True, vocab_size=8),
    seeing(
        "Swin (transformers)",
        "swin",
        patch_size=4,
        embed_dim=width(),
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        **IN_STAGES,
    ),
    seeing(
        "ConvNeXt (transformers)",
        "convnext",
        patch_size=4,
        hidden_sizes=lambda s: [s.width, 2 * s.width],
        depths=[1, 2],
        num_stages=2,
        layer_scale_init_value=0.5,
        **IN_STAGES,
    ),
    seeing("DINOv2", "dinov2", mlp_ratio=2),
    of("CLIP, text tower", clip_text),
    of("CLIP, vision tower", clip_vision),
    of("CLIP, contrastive", clip_contrastive, mixes=True),
    of("Whisper", whisper),
    hearing("wav2vec2, group norm", "wav2vec2", feat_extract_norm="group"),
    hearing("wav2vec2, layer norm", "wav2vec2", feat_extract_norm="layer", do_stable_layer_norm=True),
    hearing("HuBERT", "hubert"),
)
