"""Models of transformers for images, video and sound, and models with several inputs per example."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trust.models.architecture import Architecture, Batch, Size, Subject, next_tokens
from trust.models.hugging_face import FAMILY, build_model, classifier_losses, configure, set_dropout
from trust.models.libraries import LISTED


def image_model(name: str, own: dict[str, Any], shape: tuple[int, ...] = (), **more: Any) -> Architecture:
    """Images (3, edge, edge) with leading axes `shape`, and one label for each example."""

    def make(size: Size) -> Subject:
        given = {"image_size": size.image, "vocab_size": None, "max_position_embeddings": None, **more, **own}
        head, _ = given.pop("head", "ImageClassification"), given.pop("mixes", False)
        batch = {"pixel_values": size.vectors(*shape, 3, size.image, size.image), "labels": size.labels()}
        return Subject(build_model(head, configure(size, **given)), batch, classifier_losses)

    return Architecture(name, FAMILY, make, own.get("mixes", False))


def clip_config(size: Size) -> Any:
    """A small configuration of both towers."""
    config = configure(size, **LISTED["clip"])
    set_dropout(config, size.dropout)
    return config


def clip_text(size: Size) -> Subject:
    """The text tower; the last token of each example is the end token."""
    model = build_model("CLIPTextModelWithProjection", clip_config(size).text_config)
    ids = size.ids().clamp_min(3)
    ids[torch.arange(size.batch), size.lengths - 1] = 2
    return Subject(model, {"input_ids": ids, "attention_mask": size.mask, "labels": size.labels()}, classifier_losses)


def clip_vision(size: Size) -> Subject:
    """The image tower."""
    model = build_model("CLIPVisionModelWithProjection", clip_config(size).vision_config)
    return Subject(model, {"pixel_values": size.images(), "labels": size.labels()}, classifier_losses)


def clip_contrastive(size: Size) -> Subject:
    """Both towers; each image is compared with the texts of all examples, so the examples mix."""
    model = build_model("CLIPModel", clip_config(size))
    ids = size.ids().clamp_min(3)
    ids[torch.arange(size.batch), size.lengths - 1] = 2

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(**batch).logits_per_image
        return F.cross_entropy(logits, torch.arange(len(logits)), reduction="none")

    return Subject(model, {"input_ids": ids, "attention_mask": size.mask, "pixel_values": size.images()}, losses)


def whisper(size: Size) -> Subject:
    """Speech to text: two convolutions, an encoder, a decoder with a head tied to its embedding."""
    model = build_model("WhisperForConditionalGeneration", configure(size, **LISTED["whisper"]))
    sound = size.vectors(8, 2 * size.tokens)

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(input_features=batch["sound"], decoder_input_ids=batch["ids"], use_cache=False).logits
        return next_tokens(logits, batch["ids"], batch["mask"])

    return Subject(model, {"sound": sound, "ids": size.ids(), "mask": size.mask}, losses)


def sound_model(name: str, own: dict[str, Any]) -> Architecture:
    """Raw sound, and one label for each example."""

    def make(size: Size) -> Subject:
        model = build_model("AudioClassification", configure(size, **own))
        batch = {"input_values": size.vectors(16 * size.tokens), "labels": size.labels()}
        return Subject(model, batch, classifier_losses)

    return Architecture(name, FAMILY, make)


def multiple_choice(size: Size) -> Subject:
    """Three texts per example, which the model folds into the batch axis."""
    model = build_model("MultipleChoice", configure(size, "bert"))
    ids = torch.stack([size.ids() for _ in range(3)], 1)
    mask = size.mask[:, None].expand(-1, 3, -1).contiguous()
    return Subject(model, {"input_ids": ids, "attention_mask": mask, "labels": size.labels()}, classifier_losses)


def siamese(size: Size) -> Subject:
    """One BERT called twice in a forward pass; the cosine of both outputs is regressed."""
    model = build_model("BertModel", configure(size, "bert"))
    batch = {"left": size.ids(), "right": size.ids(), "mask": size.mask, "target": torch.rand(size.batch)}

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        both = [model(input_ids=batch[side], attention_mask=batch["mask"]).pooler_output for side in ("left", "right")]
        return (F.cosine_similarity(*both) - batch["target"]).square()

    return Subject(model, batch, losses)


FRAMES = 4
IMAGES_AND_SOUND = (
    Architecture("BERT for multiple choice", FAMILY, multiple_choice),
    Architecture("BERT, siamese", FAMILY, siamese),
    *(image_model(name, own, patch_size=8) for name, own in LISTED["images"].items()),
    Architecture("CLIP, text tower", FAMILY, clip_text),
    Architecture("CLIP, vision tower", FAMILY, clip_vision),
    Architecture("CLIP, contrastive", FAMILY, clip_contrastive, mixes=True),
    Architecture("Whisper", FAMILY, whisper),
    *(sound_model(name, own) for name, own in LISTED["sound"].items()),
)
VIDEO_MODELS = tuple(image_model(name, own, (FRAMES,), num_frames=FRAMES) for name, own in LISTED["video"].items())
"""One label for each video; TimeSformer mixes the class tokens of frames of different examples."""
