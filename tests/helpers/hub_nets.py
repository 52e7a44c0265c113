"""Tiny models of transformers whose files on the hub have other names, and other tensors, than the model."""

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SiglipVisionConfig,
)

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 16, "patch_size": 8}
QWEN_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**TEXT, num_local_experts=3)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, num_experts=5, moe_intermediate_size=16)),
    "llava": lambda: LlavaForConditionalGeneration(
        LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT), image_token_index=63)
    ),
    "qwen2_vl": lambda: Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=QWEN_VISION)
    ),
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=Gemma3TextConfig(**TEXT), vision_config=SiglipVisionConfig(**VISION))
    ),
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=True))


def made(name: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]() if name in MODELS else llama()
