"""The vision transformer, a classifier of images (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from hpc_train.config.model import VisionTransformerConfig
from hpc_train.models import shape
from hpc_train.models.dropout import Dropout
from hpc_train.models.layers import (
    Attention,
    Block,
    BlockModel,
    ScaledDotProduct,
    find_stage_ends,
    list_block_names,
    make_feed_forward,
    make_stage_blocks,
    match_tensor_plan,
)

TENSOR_PLAN = {
    "layers.*.attention.[qkv]": "col",
    "layers.*.attention.o": "row",
    "layers.*.feed_forward.up": "col",
    "layers.*.feed_forward.down": "row",
}
"""No seq: with its class token, a sequence of patches does not divide."""


class VisionTransformer(BlockModel):
    """The whole model, or the stage that holds the blocks `names`.

    The stage with the first block holds the patch projection, the class token and the positions, the one with the last
    block the final norm and the head. Raises UserError for a shape that does not fit together.
    """

    config: VisionTransformerConfig
    plan: dict[str, str]

    def __init__(self, config: VisionTransformerConfig, names: list[str] | None = None) -> None:
        super().__init__()
        shape.check_vit(config)
        block_names = list_block_names(config.layers) if names is None else names
        self.config = config
        self.is_first, self.is_last = find_stage_ends(block_names, config.layers)
        if self.is_first:
            size = config.patch_size
            self.patches = nn.Conv2d(config.channels, config.hidden, kernel_size=size, stride=size)
            self.class_token = nn.Parameter(torch.zeros(1, 1, config.hidden))
            self.positions = nn.Parameter(torch.zeros(1, shape.count_vit_tokens(config), config.hidden))
        self.dropout = Dropout(config.dropout)
        self.layers = make_stage_blocks(block_names, lambda _: _make_block(config))
        if self.is_last:
            self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
            self.head = nn.Linear(config.hidden, config.classes)
        self.plan = match_tensor_plan(TENSOR_PLAN, self)

    def forward(self, x: Tensor) -> Tensor:
        """x: images (B, C, H, W), or in a stage that is not the first hidden states (B, patches + 1, hidden).

        Returns logits (B, classes), or in a stage that is not the last hidden states.
        """
        if self.is_first:
            x = self._embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x[:, 0])) if self.is_last else x

    def _embed(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(images), -1, -1), patches), dim=1) + self.positions
        embedded: Tensor = self.dropout(x)
        return embedded


def _make_block(config: VisionTransformerConfig) -> Block:
    hidden, heads = config.hidden, config.heads
    core = ScaledDotProduct(causal=False, dropout=config.dropout)
    attention = Attention(hidden, heads, heads, hidden // heads, bias=True, core=core)
    feed_forward = make_feed_forward(hidden, config.feed_forward, "gelu", bias=True)
    return Block(attention, feed_forward, partial(nn.LayerNorm, hidden, eps=config.norm_eps), config.dropout)
