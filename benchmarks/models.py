"""Llamas in plain torch, in the shapes that people train: nothing to install, and quick to build on
meta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NO_TARGET = -100  # what cross_entropy ignores: the token after a row's last one is not known
EPSILON = 1e-5
ROPE_BASE = 500_000.0


@dataclass(frozen=True)
class Shape:
    """What a Llama is made of: its width, that of its MLP, and counts."""

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False


# From the config.json of meta-llama/Llama-3.2-1B, Llama-2-7b, Meta-Llama-3-8B and -70B:
# 1,235,814,400, 6,738,415,616, 8,030,261,248 and 70,553,706,496 parameters.
SHAPES = {
    "1B": Shape(2048, 8192, 16, 32, 8, 128_256, tied=True),
    "7B": Shape(4096, 11_008, 32, 32, 32, 32_000),
    "8B": Shape(4096, 14_336, 32, 32, 8, 128_256),
    "70B": Shape(8192, 28_672, 80, 64, 8, 128_256),
    "200M": Shape(1024, 2816, 12, 16, 8, 32_000),  # nobody's; for what a CPU measures
    "tiny": Shape(64, 160, 4, 4, 2, 1000),
    "tiny-tied": Shape(64, 160, 4, 4, 2, 1000, tied=True),
}


def _narrow(shape: Shape) -> Shape:
    return Shape(64, 160, shape.layers, 4, 2, 1000, shape.tied)


# As deep as the others, with as many parameters of few elements: for what a CPU does besides
# computing.
NARROW = {name: f"{name}-narrow" for name in ("1B", "8B")}
SHAPES |= {narrow: _narrow(SHAPES[name]) for name, narrow in NARROW.items()}


def rope_table(positions: int, head: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, ``(positions, head / 2)`` each, computed in
    float32.

    Once for a forward, and handed to all blocks: each of them would make it again, and a buffer
    would have to be filled by whoever builds the model on meta.
    """
    half = head // 2
    frequencies = ROPE_BASE ** -(torch.arange(half, device=like.device) / half)
    angles = torch.arange(positions, device=like.device)[:, None] * frequencies
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of heads: ``(batch, heads, positions, width)``."""
    low, high = x.chunk(2, dim=-1)
    # does nothing but under autocast, where x alone is cast
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> Tensor:
    """Causal attention of ``(batch, heads, positions, width)`` with fewer heads in keys and values.

    In float32 no fused kernel of a GPU knows grouped heads (torch 2.13), and one that is not fused
    keeps all scores: there ``grouped=False`` repeats keys and values.
    """
    if not grouped:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal, with grouped keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``(batch, positions, width)`` in and out."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = attend(q, k, v, grouped=q.dtype != torch.float32 or not q.is_cuda)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, positions, width)`` in and out."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each behind its norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=EPSILON)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=EPSILON)
        self.attention, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``(batch, positions, width)`` in and out."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Head(nn.Linear):
    """The output layer, and the loss in chunks: whoever gathers the weight for its forward gathers
    it once.

    Attributes:
        chunk: tokens whose logits exist at a time; None leaves the loss to the model, of all logits
            at once. 16,384 tokens of 128,256 words are 7.8 GiB in float32, and their gradient as
            many.
        chunk_loss: :func:`chunk_loss`, or what ``torch.compile`` made of
            :func:`fusible_chunk_loss`.
    """

    def __init__(self, shape: Shape, chunk: int | None) -> None:
        super().__init__(shape.width, shape.vocabulary, bias=False)
        self.chunk = chunk
        self.chunk_loss = chunk_loss

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The logits of ``(batch, positions, width)``, or with targets, in chunks, the mean loss in
        float32.
        """
        if targets is None:
            return super().forward(x)
        chunk = self.chunk or targets.numel()
        loss = ChunkedLoss.apply(
            x.flatten(0, 1), self.weight, targets.flatten(), chunk, self.chunk_loss
        )  # type: ignore[no-untyped-call]
        return loss  # type: ignore[no-any-return]  # noqa: RET504


def chunk_loss(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses of a chunk's tokens times ``scale``, and its gradient by the logits in
    their dtype.

    In place: one copy of the logits in float32 is all that exists.
    """
    weights, picked = _weights_and_picked(targets, scale)
    logits = (x @ weight.T).float()
    of_target = logits.gather(1, picked)
    largest = logits.amax(dim=1, keepdim=True)
    powers = logits.sub_(largest).exp_()
    total = powers.sum(dim=1, keepdim=True)
    losses = total.log() + largest - of_target
    powers.mul_(weights / total).scatter_add_(1, picked, -weights)
    return (losses * weights).sum(), powers.to(x.dtype)


def fusible_chunk_loss(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for a compiler, which fuses it to passes over the logits as the
    product left them.
    """
    weights, picked = _weights_and_picked(targets, scale)
    logits = (x @ weight.T).float()
    largest = logits.amax(dim=1, keepdim=True)
    powers = (logits - largest).exp()
    total = powers.sum(dim=1, keepdim=True)
    losses = total.log() + largest - logits.gather(1, picked)
    words = torch.arange(logits.shape[1], device=logits.device)
    gradient = (powers / total - (words == picked).float()) * weights
    return (losses * weights).sum(), gradient.to(x.dtype)


def _weights_and_picked(targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """What each token counts, and the word that it is about, ``(tokens, 1)`` each."""
    return ((targets != NO_TARGET) * scale)[:, None], targets.clamp(min=0)[:, None]


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy of a linear layer, whose logits exist for some tokens at a time.

    Forward computes the gradients too, so backward has nothing to compute again: the matrix
    products are those of ordinary cross entropy, three for each chunk. The weight's gradient is
    added up in the dtype of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        per_chunk: Callable[..., Any],
    ) -> Tensor:
        """The mean loss."""
        scale = 1.0 / (targets != NO_TARGET).sum()
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        of_x = torch.empty_like(x)
        of_weight = torch.zeros_like(weight)
        for start in range(0, len(x), chunk):
            some = slice(start, start + chunk)
            part, of_logits = per_chunk(x[some], weight, targets[some], scale)
            loss += part
            of_x[some] = of_logits @ weight
            of_weight.addmm_(of_logits.T, x[some])
        ctx.save_for_backward(of_x, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *of_loss: Tensor) -> tuple[Tensor | None, ...]:
        """What forward computed, in place: it is given away."""
        of_x, of_weight = ctx.saved_tensors
        return of_x.mul_(of_loss[0]), of_weight.mul_(of_loss[0]), None, None, None


class Llama(nn.Module):
    """From token ids, ``(batch, positions)``, to the loss of the next ones.

    Args:
        shape: of which size.
        chunk: see :class:`Head`. None computes all logits at once, as most code does.
    """

    def __init__(self, shape: Shape, chunk: int | None = None) -> None:
        super().__init__()
        self.width_of_heads = shape.width // shape.heads
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=EPSILON)
        self.head = Head(shape, chunk)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw all values: logits with a variance of 1/4, so that the first loss is ln(vocabulary)
        and an eighth.
        """
        for param in self.parameters():
            if param.dim() == 1:
                param.fill_(1.0)
            else:
                param.normal_(std=0.5 * self.embed.embedding_dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss in float32."""
        x = self.embed(ids)
        cos, sin = rope_table(ids.shape[1], self.width_of_heads, like=x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        if self.head.chunk is not None:
            return self.head(x, F.pad(ids[:, 1:], (0, 1), value=NO_TARGET))  # type: ignore[no-any-return]
        logits = self.head(x).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, as transformers' models name it for tools that look."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """The head, likewise."""
        return self.head


def llama(name: str, chunk: int | None = None) -> Llama:
    """A Llama of a named shape, on the meta device."""
    with torch.device("meta"):
        return Llama(SHAPES[name], chunk)


def tokens(batch: int, positions: int) -> Tensor:
    """Token ids without values."""
    return torch.empty(batch, positions, dtype=torch.long, device="meta")
