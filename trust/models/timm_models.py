"""Networks of timm, small, from their classes, with random weights; BatchNorm is in eval mode, as frozen statistics."""

import importlib
import inspect
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from groupwise.torchvision_import import mend_torchvision
from trust.models.architecture import Architecture, Size, Subject, in_eval
from trust.models.torchvision_models import losses

SMALL: dict[str, Any] = {"img_size": 32}
VIT: dict[str, Any] = {**SMALL, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0}
MIXER: dict[str, Any] = {**SMALL, "patch_size": 8, "embed_dim": 16, "num_blocks": 2}
WINDOWS: dict[str, Any] = {**SMALL, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "mlp_ratio": 2.0}
LEVIT: dict[str, Any] = {"img_size": 64, "image": 64, "embed_dim": (16, 32), "key_dim": 4, "depth": (1, 1)}
LEVIT |= {"num_heads": (2, 4)}
FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 32), "num_heads": (1, 2, 4, 4)}


def of(name: str, path: str, image: int = 32, mixes: bool = False, **own: Any) -> Architecture:
    """A line of the list: `<module of timm.models>.<class or function>`, the edge of its images, its arguments.

    An argument that is a function is called with that module. With `mixes` BatchNorm stays in train mode.
    """

    def make(size: Size) -> Subject:
        mend_torchvision()  # timm imports it
        module, _, cls = path.partition(".")
        models = importlib.import_module(f"timm.models.{module}")
        given = {key: value(models) if callable(value) else value for key, value in own.items()}
        make_network = getattr(models, cls)
        known = inspect.signature(make_network).parameters
        rates = {rate: size.dropout for rate in ("drop_rate", "drop_path_rate") if rate in known or "kwargs" in known}
        network = make_network(num_classes=3, **rates, **given)
        if not mixes:
            for layer in network.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm) or type(layer).__name__ == "RelPosMlp":
                    in_eval(layer)  # the latter drops one bias for the whole batch
        nn.init.normal_(list(network.parameters())[-2], std=0.1)  # many heads begin at zero
        larger = Size(size.batch, image=image)
        with torch.no_grad():
            network(larger.images())  # some fill buffers of positions the first time
        return Subject(network, {"images": larger.images(), "labels": larger.labels()}, losses)

    return Architecture(name, "timm", make, mixes, needs="timm")


ONE_BLOCK: dict[str, Any] = {"embed_dim": (16,), "depths": (1,), "block_type": ("M",), "stem_width": 8}
"""Of MaxViT's family."""


def maxvit(models: Any) -> Any:
    """One block, convolutional with squeeze and excitation, then attention in windows and over a grid."""
    return models.MaxxVitCfg(**ONE_BLOCK, transformer_cfg=models.MaxxVitTransformerCfg(dim_head=4, window_size=(2, 2)))


def maxvit_next(models: Any) -> Any:
    """The same with ConvNeXt's block and LayerNorm, and a network for the bias of relative positions."""
    return models.MaxxVitCfg(
        **ONE_BLOCK,
        conv_cfg=models.MaxxVitConvCfg(block_type="convnext", expand_ratio=2, init_values=0.5),
        transformer_cfg=models.MaxxVitTransformerCfg(
            dim_head=4, window_size=(2, 2), rel_pos_type="mlp", init_values=0.5, norm_layer="layernorm2d"
        ),
    )


def norm_free(models: Any) -> Any:
    """Two stages of standardised convolutions."""
    return models.NfCfg(depths=(1, 1), channels=(16, 32), stem_type="3x3", stem_chs=8, bottle_ratio=0.5, group_size=8)


def mvit(models: Any) -> Any:
    """Two stages; queries and keys are pooled."""
    return models.MultiScaleVitCfg(depths=(1, 1), embed_dim=(16, 32), num_heads=(1, 2), expand_attn=True)


TIMM = (
    of("ViT (timm)", "vision_transformer.VisionTransformer", **VIT, init_values=0.5),
    of(
        "ViT (timm), registers, norms of queries",
        "vision_transformer.VisionTransformer",
        **VIT,
        qk_norm=True,
        reg_tokens=2,
        global_pool="avg",
    ),
    of(
        "ViT (timm), attention pooling",
        "vision_transformer.VisionTransformer",
        **VIT,
        global_pool="map",
        class_token=False,
    ),
    of(
        "ViT (timm), parallel",
        "vision_transformer.VisionTransformer",
        **VIT,
        block_fn=attrgetter("ParallelScalingBlock"),
        class_token=False,
        global_pool="avg",
    ),
    of("DeiT (timm)", "deit.VisionTransformerDistilled", **VIT),
    of("DeiT III (timm)", "vision_transformer.VisionTransformer", **VIT, no_embed_class=True, init_values=0.5),
    of("BEiT (timm)", "beit.Beit", **VIT, init_values=0.5, use_abs_pos_emb=False, use_rel_pos_bias=True),
    of("BEiT (timm), shared bias", "beit.Beit", **VIT, use_abs_pos_emb=False, use_shared_rel_pos_bias=True),
    of("EVA-02 (timm)", "eva.Eva", **VIT, swiglu_mlp=True, use_rot_pos_emb=True, qkv_fused=False, scale_mlp=True),
    of("CaiT (timm)", "cait.Cait", **VIT, init_values=0.5, depth_token_only=1),
    of("XCiT (timm)", "xcit.Xcit", **VIT, eta=0.5, cls_attn_layers=1, tokens_norm=True),
    of("ConViT (timm)", "convit.ConVit", **VIT, local_up_to_layer=1),
    of("Swin (timm)", "swin_transformer.SwinTransformer", **WINDOWS, window_size=4),
    of("Swin v2 (timm)", "swin_transformer_v2.SwinTransformerV2", **WINDOWS, window_size=4),
    of("MaxViT (timm)", "maxxvit.MaxxVit", cfg=maxvit, **SMALL),
    of("MaxxViT (timm), LayerNorm", "maxxvit.MaxxVit", cfg=maxvit_next, **SMALL),
    of("GCViT (timm)", "gcvit.GlobalContextVit", **WINDOWS, window_size=(4, 4), layer_scale=0.5),
    of("MLP-Mixer (timm)", "mlp_mixer.MlpMixer", **MIXER),
    of(
        "ResMLP (timm)",
        "mlp_mixer.MlpMixer",
        **MIXER,
        mlp_ratio=2,
        block_layer=attrgetter("ResBlock"),
        norm_layer=attrgetter("Affine"),
    ),
    of(
        "gMLP (timm)",
        "mlp_mixer.MlpMixer",
        **MIXER,
        mlp_ratio=2,
        block_layer=attrgetter("SpatialGatingBlock"),
        mlp_layer=attrgetter("GatedMlp"),
    ),
    of("ConvNeXt (timm)", "convnext.ConvNeXt", image=64, depths=(1,) * 4, dims=(8, 16, 16, 32), ls_init_value=0.5),
    of(
        "ConvNeXt v2 (timm)",
        "convnext.ConvNeXt",
        image=64,
        depths=(1,) * 4,
        dims=(8, 16, 16, 32),
        ls_init_value=None,
        use_grn=True,
    ),
    of("BiT (timm)", "resnetv2.ResNetV2", layers=[1, 1], channels=(128, 256), stem_chs=32, stem_type="fixed"),
    of("NF-ResNet (timm)", "nfnet.NormFreeNet", cfg=norm_free),
    of("PoolFormer (timm)", "metaformer.MetaFormer", depths=(1, 1), dims=(16, 32), layer_scale_init_values=0.5),
    of(
        "CAFormer (timm)",
        "metaformer.MetaFormer",
        depths=(1, 1),
        dims=(32, 64),
        token_mixers=attrgetter("SepConv", "Attention"),
        norm_layers=attrgetter("LayerNorm2dNoBias", "LayerNormNoBias"),
    ),
    of("PVT v2 (timm)", "pvt_v2.PyramidVisionTransformerV2", **FOUR, sr_ratios=(2, 2, 1, 1), mlp_ratios=(2.0,) * 4),
    of(
        "PVT v2 (timm), linear",
        "pvt_v2.PyramidVisionTransformerV2",
        **FOUR,
        linear=True,
        mlp_ratios=(2.0,) * 4,
        image=64,
    ),
    of("Twins (timm)", "twins.Twins", **FOUR, wss=(2, 2, 2, 2), sr_ratios=(4, 2, 1, 1), img_size=64, image=64),
    of(
        "CrossViT (timm)",
        "crossvit.CrossVit",
        **SMALL,
        patch_size=(8, 16),
        embed_dim=(16, 32),
        depth=((1, 1, 0),),
        num_heads=(2, 4),
        mlp_ratio=(2.0, 2.0, 1.0),
    ),
    of(
        "Hiera (timm)",
        "hiera.Hiera",
        img_size=(64, 64),
        image=64,
        embed_dim=16,
        stages=(1, 1),
        q_pool=1,
        mask_unit_size=(4, 4),
        mask_unit_attn=(True, False),
    ),
    of("NesT (timm)", "nest.Nest", **SMALL, embed_dims=(16, 32), num_heads=(2, 4), depths=(1, 1), num_levels=2),
    of("FocalNet (timm)", "focalnet.FocalNet", embed_dim=16, depths=(1, 1), layerscale_value=0.5),
    of("DaViT (timm)", "davit.DaVit", embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 4), window_size=4),
    of("MViT v2 (timm)", "mvitv2.MultiScaleVit", cfg=mvit, img_size=(32, 32)),
    of(
        "Sequencer (timm)",
        "sequencer.Sequencer2d",
        **SMALL,
        layers=(1, 1),
        patch_sizes=(8, 2),
        embed_dims=(16, 16),
        hidden_sizes=(4, 4),
        mlp_ratios=(2.0, 2.0),
    ),
    of(
        "VOLO (timm)",
        "volo.VOLO",
        **SMALL,
        layers=[1, 1],
        patch_size=8,
        stem_hidden_dim=8,
        embed_dims=[16, 32],
        num_heads=[2, 4],
        use_aux_head=False,
    ),
    of("LeViT (timm)", "levit.Levit", **LEVIT),
    of("LeViT (timm), BatchNorm in train mode", "levit.Levit", mixes=True, **LEVIT),
    of("RepViT (timm)", "repvit.RepVit", image=64, embed_dim=(16, 32), depth=(2, 2), distillation=False),
    of("TinyViT (timm)", "tiny_vit.TinyVit", embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 4), window_sizes=(4, 4)),
    of(
        "Visformer (timm)",
        "visformer.Visformer",
        img_size=64,
        image=64,
        init_channels=8,
        embed_dim=32,
        depth=(1, 1, 1),
        num_heads=4,
    ),
)
