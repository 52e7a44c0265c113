"""The same training twice, sharded over all ranks and plain in one process, and compared.

A byte-level transformer in plain torch learns Python's own sources.
"""

from __future__ import annotations

import functools
import gc
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardkit import apply_plan, full_state_dict, init_on_meta, materialize, plan_model
from shardkit.ranks import device_type

SEED = 0
LEARNING_RATE = 3e-3
# Well above a gradient's rounding, which AdamW would turn into whole steps where the gradient is 0.
EPS = 1e-5
SEQUENCES = 8  # of one micro-batch, one for each rank and step
CONTEXT = 128  # bytes of each sequence
MOST_STEPS = 150  # after which roundings grow too large to compare
BYTES = 256


class ByteTransformer(nn.Module):
    """Predicts the next byte of a text: torch's pre-norm blocks over embedded bytes and sinusoidal
    positions.
    """

    positions: Tensor

    def __init__(
        self, dim: int = 128, num_layers: int = 4, num_heads: int = 4, context: int = 128
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, dim)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            layer = nn.TransformerEncoderLayer(
                dim, num_heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.layers.append(layer)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, BYTES, bias=False)
        angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(0, dim, 2) / dim))
        # Not persistent, so not in any checkpoint: materialize() has to compute it, and does.
        positions = torch.cat((angles.sin(), angles.cos()), dim=-1)
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte, (batch, sequence, 256), for int64 bytes of (batch,
        sequence).
        """
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embedding(tokens) + self.positions[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@functools.cache
def load_text() -> Tensor:
    """Return the ``*.py`` files of the standard library, concatenated, as uint8 of shape
    (bytes,).
    """
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)


@dataclass(frozen=True)
class Job:
    """What is trained, on how many ranks, and for how long."""

    ranks: int  # each with a micro-batch of its own
    steps: int  # of the optimizer

    def batch(self, step: int) -> Tensor:
        """The micro-batches of all ranks, int64 of shape (ranks * SEQUENCES, CONTEXT + 1); the same
        for each step.
        """
        text = load_text()
        generator = torch.Generator().manual_seed(step)
        size = (self.ranks * SEQUENCES, 1)
        starts = torch.randint(len(text) - CONTEXT, size, generator=generator)
        return text[starts + torch.arange(CONTEXT + 1)].long()

    def say(self, text: str) -> None:
        """Show a text, on rank 0 only."""
        if dist.get_rank() == 0:
            print(text, flush=True)


@dataclass
class Run:
    """The results of a training that are compared."""

    losses: list[Tensor] = field(default_factory=list)  # of each step, the mean over its batch
    # the final ones by FQN, full and on the CPU
    weights: dict[str, Tensor] = field(default_factory=dict)


def train_and_compare(job: Job) -> bool:
    """Train twice, show the comparison on rank 0, and return there whether the trainings agree.
    Collective.
    """
    # Matrix products may differ in the last digit between numbers of threads; and ranks share the
    # cores.
    torch.set_num_threads(1)
    device = device_type()
    job.say(
        f"shardkit demo: {job.ranks} rank(s) on {device}, {job.steps} steps on Python's own sources"
    )
    sharded = train_sharded(job)
    if dist.get_rank() != 0:
        return True
    gc.collect()  # the sharded model is in reference cycles
    plain = train_plain(job, device)
    checks = compare(device, job.ranks, sharded, plain)
    job.say("\nSharded against plain, the largest difference over all steps and all elements:")
    job.say("\n".join(map(str, checks)))
    return all(check.holds for check in checks)


def train_sharded(job: Job) -> Run:
    """Train with every rank on its own micro-batch. Collective: every rank must call."""
    torch.manual_seed(SEED)
    with init_on_meta():
        model = ByteTransformer(context=CONTEXT)
    plan = plan_model(model)
    job.say(f"\n{plan}\n")
    materialize(apply_plan(model, plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    run = _train(job, "sharded", model, optimizer, [])
    # Only to compare them: all weights on every rank, which a model of this size allows.
    run.weights = full_state_dict(model, rank0_only=False)
    return run


def train_plain(job: Job, device: str) -> Run:
    """Train the same model without shardkit, in this process alone, one micro-batch after the
    other.
    """
    torch.manual_seed(SEED)
    model = ByteTransformer(context=CONTEXT).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    run = _train(job, "plain", model, optimizer, range(job.ranks))
    run.weights = {fqn: param.detach().cpu() for fqn, param in model.named_parameters()}
    return run


def _train(
    job: Job, title: str, model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[int]
) -> Run:
    """Train on these parts of each batch, one after the other; if there are none, on this rank's
    part, together with the other ranks.
    """
    run = Run()
    device = next(model.parameters()).device
    for step in range(job.steps):
        batch = job.batch(step).to(device)
        mean = torch.zeros((), device=device)
        optimizer.zero_grad()
        for part in parts or [dist.get_rank()]:
            tokens = batch.chunk(job.ranks)[part]
            loss = _loss(model(tokens[:, :-1]), tokens)
            (loss / max(1, len(parts))).backward()  # type: ignore[no-untyped-call]
            mean += loss.detach() / job.ranks
        if not parts:
            dist.all_reduce(mean)
        optimizer.step()
        run.losses.append(mean)
        done = step + 1
        if done in (1, job.steps) or done % max(1, job.steps // 4) == 0:
            width = len(str(job.steps))
            job.say(f"{title:8} step {done:>{width}}/{job.steps}  loss {mean.item():.4f}")
    return run


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# Largest differences allowed. With more than two ranks, or on a GPU, gradients are summed in
# another order, and training amplifies such roundings: 8e-7 in a weight after 60 steps on 3 ranks,
# 4e-5 after 150. A wrong gradient moves weights by whole AdamW steps.
SAME = "the arithmetic is the same"
EXACT = {"losses": (0, SAME), "final weights": (0, SAME)}
ROUNDED = {
    "losses": (1e-3, "nats; gradients are summed in another order"),
    "final weights": (LEARNING_RATE / 3, "a third of an AdamW step; likewise"),
}


def is_exact(device: str, ranks: int) -> bool:
    """Return whether the arithmetic is the same on both sides: a sum of two does not depend on
    their order.
    """
    return device == "cpu" and ranks <= 2


class Check(NamedTuple):
    """The largest difference found, the largest allowed, and why; prints as a line."""

    name: str
    difference: float
    bound: float
    reason: str

    @property
    def holds(self) -> bool:
        """Whether the difference is within the bound; False for nan."""
        return self.difference <= self.bound

    def __str__(self) -> str:
        allowed = f"at most {self.bound:g}, {self.reason}"
        verdict = "ok" if self.holds else "FAILED"
        return f"  {self.name:13}  {self.difference:<9.3g}  {allowed:55}  {verdict}"


def compare(device: str, ranks: int, sharded: Run, plain: Run) -> list[Check]:
    """Return the checks of a sharded run against a plain one."""
    losses = _difference(torch.stack(sharded.losses), torch.stack(plain.losses))
    weights = [_difference(sharded.weights[fqn], weight) for fqn, weight in plain.weights.items()]
    bounds = EXACT if is_exact(device, ranks) else ROUNDED
    return [
        Check("losses", losses, *bounds["losses"]),
        Check("final weights", max(weights), *bounds["final weights"]),
    ]


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape; nan if there is one."""
    assert one.shape == other.shape
    return (one.cpu() - other.cpu()).abs().max().item()
