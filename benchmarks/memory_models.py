"""Twenty models of many kinds, of any width, for ``python -m benchmarks.memory --table``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Llama, Shape

LAYERS, HEADS, BATCH, LENGTH, PIXELS = 4, 4, 2, 64, 64
Model = tuple[Callable[[], nn.Module], dict[str, Tensor]]


class Recurrent(nn.Module):
    """A language model of LSTMs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16 * width, width)
        self.lstm = nn.LSTM(width, width, num_layers=LAYERS, batch_first=True)
        self.head = nn.Linear(width, 16 * width)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of ``(batch, positions)`` tokens."""
        return self.head(self.lstm(self.tokens(ids))[0])  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A block of two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.GroupNorm(8, width), nn.GroupNorm(8, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, channels, height, width)`` in and out."""
        inner = self.norm_one(self.one(x)).relu()
        return (x + self.norm_two(self.two(inner))).relu()  # type: ignore[no-any-return]


def convolutions(width: int) -> nn.Module:
    """A residual network of images, with group norms: torch's batch norm is not for bf16 units."""
    blocks = [Residual(width) for _ in range(LAYERS)]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)
    return nn.Sequential(nn.Conv2d(3, width, 7, 4, 3), *blocks, *ends)


def encoder(width: int) -> nn.Module:
    """``nn.TransformerEncoder``."""
    layer = nn.TransformerEncoderLayer(width, HEADS, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def models(width: int) -> dict[str, Model]:
    """Return what builds each model, and a batch; those of transformers only if it is installed."""
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    llama = Shape(width, 3 * width, LAYERS, HEADS, 2, 16 * width)
    tied = Shape(width, 3 * width, LAYERS, HEADS, 2, 16 * width, tied=True)
    found: dict[str, Model] = {
        "Llama": (lambda: Llama(llama), {"ids": ids}),
        "Llama, tied": (lambda: Llama(tied), {"ids": ids}),
        "LSTM": (lambda: Recurrent(width), {"ids": ids}),
        "ResNet": (lambda: convolutions(width), {"input": torch.zeros(BATCH, 3, PIXELS, PIXELS)}),
        "nn.TransformerEncoder": (
            lambda: encoder(width),
            {"src": torch.zeros(BATCH, LENGTH, width)},
        ),
    }
    try:
        import transformers
    except ImportError:
        return found
    text = {"input_ids": ids, "labels": ids}
    image = {"pixel_values": torch.zeros(BATCH, 3, PIXELS, PIXELS)}
    usual = {
        "vocab_size": 16 * width,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
    }
    cut = {"image_size": PIXELS, "patch_size": 16}
    positions = {"max_position_embeddings": 2 * LENGTH}
    gpt = {"n_embd": width, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * LENGTH}
    t5 = {"d_model": width, "d_ff": 3 * width, "d_kv": width // HEADS, "num_heads": HEADS}
    swin = {"embed_dim": width, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kinds: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
        "GPT2LMHeadModel": ({**gpt, "vocab_size": 16 * width, **special}, text),
        "Gemma2ForCausalLM": ({**usual, "head_dim": width // HEADS}, text),
        "Qwen3ForCausalLM": (
            {**usual, "head_dim": width // HEADS, "num_key_value_heads": 2},
            text,
        ),
        "PhiForCausalLM": (usual, text),
        "GPTNeoXForCausalLM": (usual, text),
        "FalconForCausalLM": (usual, text),
        "OPTForCausalLM": (
            {**usual, "ffn_dim": 3 * width, "word_embed_proj_dim": width, **positions},
            text,
        ),
        "MambaForCausalLM": ({**usual, "state_size": 8, "time_step_rank": 4}, text),
        "BertForMaskedLM": ({**usual, **positions}, text),
        "ElectraForMaskedLM": ({**usual, "embedding_size": width, **positions}, text),
        "DebertaV2ForMaskedLM": ({**usual, "relative_attention": True, **positions}, text),
        "T5ForConditionalGeneration": (
            {**t5, "vocab_size": 16 * width, "num_layers": LAYERS, "decoder_start_token_id": 0},
            text,
        ),
        "ViTForImageClassification": ({**usual, **cut}, image),
        "Dinov2ForImageClassification": ({**usual, **cut}, image),
        "SwinForImageClassification": ({**swin, "image_size": PIXELS, "patch_size": 4}, image),
    }
    for name, (arguments, batch) in kinds.items():
        kind = getattr(transformers, name)
        config = kind.config_class(**arguments)
        found[name] = (lambda kind=kind, config=config: kind(config), batch)  # type: ignore[misc]
    return found
