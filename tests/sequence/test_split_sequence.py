"""Splitting sequences over ranks changes nothing but the order of sums: float64, against one process."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from sequence_parity import parity
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


def kinds(seed):
    """Micro-batches: of odd length, padded on the left, on the right, and of three documents."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 67, (4, 2, 16), generator=generator)
    labels = ids.clone()
    labels[:, :, : 3 + seed % 3] = -100
    batches = [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]
    odd = {name: x[:, :13] for name, x in batches[0].items()}
    for batch, hidden in ((batches[1], slice(None, 5)), (batches[2], slice(10, None))):
        batch["attention_mask"] = torch.ones(2, 16, dtype=torch.long)
        batch["attention_mask"][1, hidden] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    lengths = [5, 2, 9 + seed % 2 - 1]
    packed = {name: x[:1, : sum(lengths)] for name, x in batches[3].items()}
    packed["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    return [odd, batches[1], batches[2], packed]


@pytest.mark.parametrize("name", MODELS)
@distributed(world_size=4, backend="gloo")
def test_parity(name):
    # Eager attention rounds its softmax to float32, where rows that are padded on the left begin with nan.
    batches = [kinds(0), kinds(1)] if name != "eager" else [kinds(0)[2:], kinds(1)[2:]]
    loss, grads = parity(build(name), batches, sp=2)
    assert loss < (1e-14 if name != "eager" else 1e-8)
    assert grads < (1e-13 if name != "eager" else 1e-7)
