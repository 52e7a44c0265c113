"""The same training three times: sharded over all ranks, plain in one process, and resumed on other ranks; compared."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardkit import (
    clip_grad_norm_,
    full_state_dict,
    init_on_meta,
    load_checkpoint,
    materialize,
    plan_model,
    save_checkpoint,
    shard_model,
)
from shardkit.demo.model import ByteTransformer, load_text, micro_batch
from shardkit.memory import MemoryReport, estimate, memory_report
from shardkit.plan.types import nbytes

SEED, LEARNING_RATE, MAX_NORM = 0, 3e-3, 0.5
EPS = 1e-5  # well above a gradient's rounding, which AdamW would turn into whole steps where the gradient is 0
SEQUENCES, CONTEXT = 8, 128  # of one micro-batch, one for each rank and step; bytes of each
CHECKPOINT, OUTPUT = "checkpoint", "output"  # files in the folder of a job
MOST_RESUMED = 10  # steps, which are trained a second time
MOST_STEPS = 150  # where roundings grow


@dataclass(frozen=True)
class Job:
    """What is trained, on how many ranks, and for how long."""

    ranks: int  # those that train first, each on a micro-batch of its own
    steps: int  # of the optimizer
    folder: Path | None = None  # for the checkpoint and what rank 0 says; None saves nothing and prints

    @property
    def saved_after(self) -> int:
        """The number of steps after which the checkpoint is saved."""
        return self.steps - min(MOST_RESUMED, self.steps // 2)

    def batch(self, step: int) -> Tensor:
        """The micro-batches of all ``ranks``, int64 of shape (ranks * SEQUENCES, CONTEXT + 1)."""
        numbers = range(step * self.ranks, (step + 1) * self.ranks)
        return torch.cat([micro_batch(load_text(), number, SEQUENCES, CONTEXT) for number in numbers])

    def say(self, text: str) -> None:
        """Show a text, on rank 0 only."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            with (self.folder / OUTPUT).open("a") if self.folder else nullcontext(sys.stdout) as file:
                print(text, file=file, flush=True)


@dataclass
class Run:
    """The results of a training that are compared."""

    losses: list[Tensor] = field(default_factory=list)  # of each step, the mean over its batch
    norms: list[Tensor] = field(default_factory=list)  # of each step, of the gradients before clipping
    weights: dict[str, Tensor] = field(default_factory=dict)  # the final ones by FQN, full and on the CPU
    memory: MemoryReport | None = None  # after the last step


def train_and_compare(job: Job) -> list[float] | None:
    """Train twice and show the comparison; return the losses, or None where the trainings differ. Collective."""
    # Matrix products may differ in the last digit between numbers of threads, and ranks share the cores.
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    of_text = f"{len(load_text()) / 2**20:.1f} MiB of Python's own sources"
    ranks = f"{job.ranks} rank{'s' * (job.ranks > 1)}"
    job.say(f"shardkit demo: {ranks} on {device.type}, {job.steps} steps on {of_text}")
    sharded = train_sharded(job)
    if dist.get_rank() != 0:
        return []
    gc.collect()  # the sharded model is in reference cycles
    plain = train_plain(job, sharded.norms, device)
    checks = compare(device.type, job.ranks, sharded, plain)
    assert plain.memory is not None
    held = sum(plain.memory.measured[name] for name in ("parameters", "gradients", "optimizer"))
    job.say("\nSharded against plain, the largest difference over all steps and all elements:")
    job.say("\n".join(map(str, checks)))
    job.say(f"\nMemory of rank 0 after a step, and as estimate() predicted it:\n{sharded.memory}")
    job.say(f"unsharded: {nbytes(held)} of parameters, gradients and optimizer state")
    return [loss.item() for loss in sharded.losses] if all(check.holds for check in checks) else None


def train_sharded(job: Job) -> Run:
    """Train with every rank on its own micro-batch. Collective: every rank must call."""
    torch.manual_seed(SEED)
    with init_on_meta():
        model = ByteTransformer(context=CONTEXT)
    plan = plan_model(model)
    tokens = job.batch(0)[:SEQUENCES]
    rows = estimate(model, plan=plan, batch=tokens[:, :-1], loss=lambda logits: _loss(logits, tokens))
    job.say(f"\n{plan}\n")
    materialize(shard_model(model, plan=plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    run = _train(job, "sharded", model, optimizer, lambda _: clip_grad_norm_(model, MAX_NORM))
    run.memory = memory_report(model, optimizer, predicted=rows["ZeRO-3"])
    # Gathering all weights on every rank is fine for a model of this size, and is only needed to compare them.
    run.weights = full_state_dict(model, rank0_only=False)
    return run


def train_plain(job: Job, norms: list[Tensor], device: torch.device) -> Run:
    """Train the same model without shardkit, in this process alone, one micro-batch after the other.

    The gradients are scaled by ``norms``, the sharded run's: norms are sums of many squares, whose last digits depend
    on the order of summation. This run's own norms are computed in float64, to check those against.
    """
    torch.manual_seed(SEED)
    model = ByteTransformer(context=CONTEXT).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)

    def clip(step: int) -> Tensor:
        grads = [param.grad.double() for param in model.parameters() if param.grad is not None]
        nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norms[step])
        return nn.utils.get_total_norm(grads)

    run = _train(job, "plain", model, optimizer, clip, parts=range(job.ranks))
    run.memory = memory_report(model, optimizer)
    run.weights = {fqn: param.detach().cpu() for fqn, param in model.named_parameters()}
    return run


def resume(job: Job) -> list[float]:
    """Train the last steps again from the checkpoint, on any number of ranks; return the losses. Collective."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED + 1)  # other weights, which the checkpoint replaces
    with init_on_meta():
        model = ByteTransformer(context=CONTEXT)
    materialize(shard_model(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)  # likewise
    assert job.folder is not None
    first = load_checkpoint(job.folder / CHECKPOINT, model, optimizer)["step"]
    run = _train(job, "resumed", model, optimizer, lambda _: clip_grad_norm_(model, MAX_NORM), first)
    return [loss.item() for loss in run.losses]


def _train(
    job: Job,
    title: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[int], Tensor],
    first: int = 0,
    parts: Sequence[int] = (),
) -> Run:
    """Train from step ``first`` on: on all ``parts`` of each batch, or on this rank's part, which is collective."""
    run, device = Run(), next(model.parameters()).device
    total = len(parts) or dist.get_world_size()
    for step in range(first, job.steps):
        batch, mean = job.batch(step).to(device), torch.zeros((), device=device)
        optimizer.zero_grad()
        for part in parts or [dist.get_rank()]:
            tokens = batch.tensor_split(total)[part]
            # Parts may differ in size; the mean of the scaled losses is the mean over the batch.
            loss = _loss(model(tokens[:, :-1]), tokens) * (total * len(tokens) / len(batch))
            (loss / max(1, len(parts))).backward()  # type: ignore[no-untyped-call]
            mean += loss.detach() / total
        if not parts:
            dist.all_reduce(mean)
        run.norms.append(clip(step))
        optimizer.step()
        run.losses.append(mean)
        done = step + 1
        if done in (1, job.steps) or done % max(1, job.steps // 4) == 0:
            job.say(f"{title:8} step {done:>{len(str(job.steps))}}/{job.steps}  loss {mean.item():.4f}")
        if title == "sharded" and job.folder is not None and done == job.saved_after:
            save_checkpoint(job.folder / CHECKPOINT, model, optimizer, extra={"step": done})
    return run


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# Largest differences allowed. With more than two ranks, or on a GPU, gradients are summed in another order, and
# training amplifies such roundings: 8e-7 in a weight after 60 steps on 3 ranks, 4e-5 after 150. A wrong or missing
# gradient moves weights by whole AdamW steps, three times this bound each. A shard's norm is a float32 sum of up to
# 33,000 squares, in 8 lanes or more: 33,000 / 8 roundings of 6e-8, half of that after the root. Seen: 6e-6.
SAME = "the arithmetic is the same"
EXACT = {"losses": (0, SAME), "final weights": (0, SAME), "clip norms": (1e-4, "relative; float32 against float64")}
ROUNDED = {
    "losses": (1e-3, "nats; gradients are summed in another order"),
    "final weights": (LEARNING_RATE / 3, "a third of an AdamW step; likewise"),
    "clip norms": (1e-2, "relative; of slightly different gradients"),
}


def is_exact(device_type: str, ranks: int) -> bool:
    """Return whether the arithmetic is the same on both sides: a sum of two does not depend on their order."""
    return device_type == "cpu" and ranks <= 2


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
        verdict = "ok" if self.holds else "FAILED"
        return f"  {self.name:13}  {self.difference:<9.3g}  {f'at most {self.bound:g}, {self.reason}':55}  {verdict}"


def compare(device_type: str, ranks: int, sharded: Run, plain: Run) -> list[Check]:
    """Return the checks of a sharded run against a plain one."""
    pairs = [(sharded.weights[fqn], weight) for fqn, weight in plain.weights.items()]
    norms = torch.stack(sharded.norms) / torch.stack(plain.norms)
    found = [
        _difference(torch.stack(sharded.losses), torch.stack(plain.losses)),
        max(_difference(one, other) for one, other in pairs),
        _difference(norms, torch.ones_like(norms)),
    ]
    bounds = EXACT if is_exact(device_type, ranks) else ROUNDED
    return [Check(name, each, *bound) for (name, bound), each in zip(bounds.items(), found, strict=True)]


def compare_resumed(losses: list[float], expected: list[float]) -> Check:
    """Return the check of a resumed training against the one that was not interrupted."""
    difference = _difference(torch.tensor(losses), torch.tensor(expected))
    return Check("losses", difference, ROUNDED["losses"][0], "nats; the batch is split, so summed, differently")


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape; nan if there is one."""
    assert one.shape == other.shape
    return (one.cpu() - other.cpu()).abs().max().item()
