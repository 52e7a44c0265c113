"""Every model of transformers, tiny, by the name of its class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

# Small values for whatever a config calls its sizes. Only construction runs, so they need not fit
# each other well.
SMALL = {
    "vocab_size": 96, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embed_dim": 32,
    "embedding_size": 32, "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "n_inner": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_hidden_size": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16, "moe_ffn_hidden_size": 16,
    "intermediate_size_mlp": 48, "dense_intermediate_size": 48, "attention_hidden_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "attention_head_dim": 8, "head_dim": 8, "d_kv": 8, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "max_position_embeddings": 64, "n_positions": 64,
    "max_source_positions": 64, "max_target_positions": 64, "pad_token_id": 0, "image_size": 32,
    "patch_size": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "lru_width": 32, "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_expand": 2, "mamba_num_heads": 4, "mamba_head_dim": 8, "time_step_rank": 4,
    "num_global_layers": 1, "block_size": 16, "pooler_hidden_size": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_codebooks": 2,
    "audio_vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "max_window_layers": 1,
    "num_kv_shared_layers": 0, "num_mel_bins": 16,
}  # fmt: skip

# What a default config lacks to build at all.
FIXES: dict[str, dict[str, Any]] = {
    "CohereCompassForCausalLM": {
        "layer_types": ["full_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "DbrxForCausalLM": {"attn_config.rope_theta": 1e4},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 8},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "MinistralForCausalLM": {"head_dim": 8},
    "NemotronForCausalLM": {"head_dim": 8, "num_key_value_heads": 2},
    "VitsModel": {"upsample_initial_channel": 32},  # a forward took half a minute
    "ReformerModelWithLMHead": {"is_decoder": True, "axial_pos_embds_dim": [8, 24]},
}

ARGUMENTS: dict[str, dict[str, Any]] = {
    "Gemma4AssistantForCausalLM": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    }
}


def shrink(config: Any) -> Any:
    """Make a default config tiny, with its sub-configs, in place."""
    for name, value in SMALL.items():
        present = config.__dict__.get(config.attribute_map.get(name, name))
        if isinstance(present, int) and not isinstance(present, bool):
            setattr(config, name, value if not _is_size(present, value) else min(value, present))
    for name, value in list(config.__dict__.items()):
        if name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(
            value, list
        ):
            setattr(config, name, value[: config.num_hidden_layers])
        if hasattr(value, "attribute_map"):
            shrink(value)
    return config


def _is_size(present: int, value: int) -> bool:
    return present > 0 and value > 0


def builder(name: str) -> Callable[[], nn.Module]:
    """A function that builds the tiny model of that transformers class."""
    model_class = getattr(transformers, name)
    config = shrink(model_class.config_class(**ARGUMENTS.get(name, {})))
    for key, value in FIXES.get(name, {}).items():
        *path, last = key.split(".")
        setattr(functools.reduce(getattr, path, config), last, value)
    return lambda: model_class(config)
