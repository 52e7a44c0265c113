"""transformers' Llama in the shapes of ``benchmarks.models``, with the same call: token ids in,
loss out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.models import EPSILON, ROPE_BASE, Shape


class HfLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Its loss is over all logits at once: transformers has no other."""

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss in float32 of token ids ``(batch, positions)``."""
        return super().forward(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

    def refresh_buffers(self, device: torch.device) -> None:
        """Compute the rotary frequencies again, which a model from meta has lost. In place."""
        with torch.device(device):
            self.model.rotary_emb = LlamaRotaryEmbedding(config=self.config)


def hf_llama(shape: Shape, positions: int) -> HfLlama:
    """On torch's default device, in float32, with the attention that transformers takes by itself,
    torch's ``sdpa``.
    """
    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=positions,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        use_cache=False,
    )
    return HfLlama(config)
