"""Attention modules of torch.nn with batch first and time first, and hand-written transformers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trust.models.architecture import Architecture, Batch, Size, each_token
from trust.models.plain_layers import net, words


class Encoder(nn.Module):
    """An embedding, nn.TransformerEncoder, and a head on the first position."""

    def __init__(self, size: Size, first: bool, before: bool, causal: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, 4, 2 * size.width, size.dropout, "gelu", batch_first=first, norm_first=before
        )
        self.layers = nn.TransformerEncoder(layer, size.depth, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, 3)
        self.first, self.causal = first, causal

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        x = x if self.first else x.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype) if self.causal else None
        padding = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask == 0, -torch.inf)
        y = self.layers(x, mask=causal, src_key_padding_mask=padding)
        return self.head(y[:, 0] if self.first else y[0])


def encoder(name: str, first: bool = True, before: bool = False, causal: bool = False) -> Architecture:
    """One architecture of the table."""
    return net(name, lambda size: Encoder(size, first, before, causal), words)


class Translator(nn.Module):
    """nn.Transformer with a head over words."""

    def __init__(self, size: Size, first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Parameter(torch.randn(size.tokens, size.width) / 4)
        self.layers = nn.Transformer(
            size.width, 4, size.depth, size.depth, 2 * size.width, size.dropout, batch_first=first
        )
        self.head = nn.Linear(size.width, size.vocabulary)
        self.first = first

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.words(source) + self.places, self.words(target) + self.places
        causal = torch.ones(len(self.places), len(self.places), dtype=torch.bool).triu(1)
        x, y = (x, y) if self.first else (x.transpose(0, 1), y.transpose(0, 1))
        logits: Tensor = self.head(self.layers(x, y, tgt_mask=causal))
        return logits if self.first else logits.transpose(0, 1)


def translator(name: str, first: bool) -> Architecture:
    """One architecture of the table."""

    def inputs(size: Size) -> Batch:
        return {"source": size.ids(), "target": size.ids(), "mask": size.mask}

    return net(name, lambda size: Translator(size, first), inputs, each_token)


class CausalBlock(nn.Module):
    """Attention by scaled_dot_product_attention and an MLP, each after LayerNorm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        wide = size.width
        self.first, self.attention, self.out = nn.LayerNorm(wide), nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.second, self.up, self.down = nn.LayerNorm(wide), nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)
        self.drop = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(2, (4, -1)).transpose(1, 2) for t in self.attention(self.first(x)).chunk(3, 2)]
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)))))


class NanoGPT(nn.Module):
    """nanoGPT: blocks between embeddings of tokens and of positions, wpe(arange(T)), and a head.

    Args:
        tied: "weight": the head has the weight of wte; "function": F.linear(x, wte.weight); "" for an untied head.
        table: positions are a slice of a parameter instead of an embedding.
    """

    def __init__(self, size: Size, tied: str, table: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocabulary, size.width)
        if table:
            self.table = nn.Parameter(torch.randn(1, 2 * size.tokens, size.width) / 4)
        else:
            self.wpe = nn.Embedding(2 * size.tokens, size.width)
        self.blocks = nn.ModuleList(CausalBlock(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        if tied != "function":
            self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        if tied == "weight":
            self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.3)
        self.tied, self.with_table = tied, table

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        places = self.table[:, :length] if self.with_table else self.wpe(torch.arange(length))
        x = self.wte(ids) + places
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.linear(x, self.wte.weight) if self.tied == "function" else self.lm_head(x)


def nano(name: str, tied: str = "", table: bool = False) -> Architecture:
    """One architecture of the table."""
    return net(name, lambda size: NanoGPT(size, tied, table), words, each_token)


ATTENTION = (
    encoder("TransformerEncoder"),
    encoder("TransformerEncoder, norm first, causal", before=True, causal=True),
    encoder("TransformerEncoder, time first", first=False),
    translator("Transformer", first=True),
    translator("Transformer, time first", first=False),
    nano("nanoGPT"),
    nano("nanoGPT, tied", tied="weight"),
    nano("nanoGPT, tied by F.linear", tied="function"),
    nano("nanoGPT, positions from a parameter", table=True),
)
