"""Splitting sequences over ranks changes nothing but the order of sums: float64, against one process."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from sequence_parity import kinds, parity
from zoo_transformers import SIZES

from shardkit.testing import distributed

SIZE = {**SIZES, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "initializer_range": 0.3}
LOCAL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2}),
    "multi-query": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 1}),
    "eager": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2, "attn_implementation": "eager"}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 2, "sliding_window": 5}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_head": 4, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "experts_implementation": "eager", **LOCAL},
    ),
}

for _head, _config, _ in MODELS.values():  # here, so that no rank imports them
    getattr(tf, _head)


def build(name, **more):
    head, config, arguments = MODELS[name]
    torch.manual_seed(0)
    return getattr(tf, head)(getattr(tf, config)(**{**SIZE, **arguments, **more})).double()


@pytest.mark.parametrize("name", MODELS)
@distributed(world_size=4, backend="gloo")
def test_parity(name):
    # Eager attention rounds its softmax to float32, where rows that are padded on the left begin with nan.
    batches = [kinds(0), kinds(1)] if name != "eager" else [kinds(0)[2:], kinds(1)[2:]]
    loss, grads = parity(build(name), batches, sp=2)
    assert loss < (1e-14 if name != "eager" else 1e-8)
    assert grads < (1e-13 if name != "eager" else 1e-7)
