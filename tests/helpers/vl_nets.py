"""Tiny vision-language models of transformers, with text and image batches, and the recipe for each."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from shardkit import by_class, by_name

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 64}
IMAGE = 60  # the id of image tokens
RECIPES = {
    "Qwen2VL": [by_name("model.visual", may_skip=True), by_class("Qwen2VLVisionBlock", "Qwen2VLDecoderLayer")],
    "Qwen3VL": [by_name("model.visual", may_skip=True), by_class("Qwen3VLVisionBlock", "Qwen3VLTextDecoderLayer")],
    "Llava": [by_class("CLIPEncoderLayer", may_skip=True), by_class("LlamaDecoderLayer")],
    "Idefics3": [by_name("model.vision_model", may_skip=True), by_class("Idefics3EncoderLayer", "LlamaDecoderLayer")],
}


def config(name: str) -> Any:
    vision: dict[str, Any]
    if name in ("Qwen2VL", "Qwen3VL"):
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        vision = {"depth": 3, "patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 2, "in_channels": 3}
        if name == "Qwen2VL":
            vision |= {"embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
        else:
            vision |= {"hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24}
            vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        text = {**TEXT, "rope_parameters": rope, "head_dim": 16}
        tokens = {"image_token_id": IMAGE, "vision_start_token_id": 61, "vision_end_token_id": 62, "video_token_id": 63}
        return getattr(transformers, f"{name}Config")(vision_config=vision, text_config=text, **tokens)
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    if name == "Llava":
        vision, text = {**vision, "model_type": "clip_vision_model"}, {**TEXT, "model_type": "llama"}
        return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    text = {**TEXT, "model_type": "llama", "pad_token_id": 0}
    return transformers.Idefics3Config(
        vision_config=vision, text_config=text, image_token_id=IMAGE, scale_factor=2, pad_token_id=0
    )


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    built = getattr(transformers, f"{name}ForConditionalGeneration")(config(name))
    return built.double().train()  # type: ignore[no-any-return]


def batch(name: str, seed: int, image: bool) -> dict[str, Any]:
    """Four text tokens, and the features of one image of 8 x 8 pixels."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (1, 12), generator=source)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    pixels = torch.randn(48, 4, generator=source, dtype=torch.double)
    if image:
        if name in ("Qwen2VL", "Qwen3VL"):
            given |= {"pixel_values": pixels.view(4, 48), "image_grid_thw": torch.tensor([[1, 2, 2]])}
        else:
            given["pixel_values"] = pixels.view(*((1, 3) if name == "Llava" else (1, 1, 3)), 8, 8)
        ids[:, 2 : 6 if name == "Llava" else 3] = IMAGE
    if name in ("Qwen2VL", "Qwen3VL"):
        given["mm_token_type_ids"] = (ids == IMAGE).long()
    return given
