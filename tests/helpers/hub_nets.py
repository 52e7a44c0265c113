"""Tiny models of transformers whose files on the hub have other names, and other tensors, than the
model.
"""

import torch
import transformers as tf

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VISION |= {"image_size": 16, "patch_size": 8}
QWEN_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
MODELS = {
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**TEXT, num_local_experts=3)),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**TEXT, num_experts=5, moe_intermediate_size=16)
    ),
    "llava": lambda: tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(
            vision_config=tf.CLIPVisionConfig(**VISION),
            text_config=tf.LlamaConfig(**TEXT),
            image_token_index=63,
        )
    ),
    "qwen2_vl": lambda: tf.Qwen2VLForConditionalGeneration(
        tf.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=QWEN_VISION)
    ),
    "marian": lambda: tf.MarianMTModel(  # its files lack the sinusoidal positions
        tf.MarianConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            pad_token_id=1,
        )
    ),
    "gemma3": lambda: tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(
            text_config=tf.Gemma3TextConfig(**TEXT), vision_config=tf.SiglipVisionConfig(**VISION)
        )
    ),
}


def llama() -> tf.LlamaForCausalLM:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT, tie_word_embeddings=True))


def made(name: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]() if name in MODELS else llama()
