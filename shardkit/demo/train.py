"""The same training three times: sharded over all ranks, plain in one process, and resumed on other ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import clip_grad_norm_, full_state_dict, init_on_meta, materialize, plan_model, shard_model
from shardkit._torch import TorchDispatchMode, local_tensor
from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.demo.model import ByteTransformer, load_text, micro_batch
from shardkit.memory import memory_report

SEED = 0
LEARNING_RATE = 3e-3
EPS = 1e-5  # well above the rounding of a gradient, of which AdamW would make whole steps where the gradient is 0
MAX_NORM = 0.5
SEQUENCES = 8  # of one micro-batch, one for each rank and step
CONTEXT = 128  # bytes of each
CHECKPOINT = "checkpoint"
MOST_RESUMED = 10  # steps, which are trained a second time
PROGRESS_LINES = 5  # off a terminal


@dataclass(frozen=True)
class Job:
    """What is trained, on how many ranks, for how long, and where checkpoint and messages go."""

    ranks: int  # those that train first, each on a micro-batch of its own
    steps: int  # of the optimizer
    folder: Path | None = None  # for the checkpoint; None saves none
    output: Path | None = None  # that rank 0 writes its messages to, for another process to print; None prints them
    terminal: bool = False  # whether they are shown on one, where the line of progress moves

    @property
    def saved_after(self) -> int:
        """The number of steps after which the checkpoint is saved."""
        return self.steps - min(MOST_RESUMED, self.steps // 2)

    def batch(self, step: int) -> Tensor:
        """The micro-batches of all ``ranks``, int64 of shape (ranks * SEQUENCES, CONTEXT + 1)."""
        numbers = range(step * self.ranks, (step + 1) * self.ranks)
        return torch.cat([micro_batch(load_text(), number, SEQUENCES, CONTEXT) for number in numbers])

    def say(self, text: str, end: str = "\n") -> None:
        """Show on rank 0."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            with self.output.open("a") if self.output else nullcontext(sys.stdout) as file:
                print(text, end=end, file=file, flush=True)

    def show_progress(self, title: str, step: int, loss: Tensor) -> None:
        """Step ``step``, from 0, is done: a line that moves on a terminal, and a few lines elsewhere."""
        last = step + 1 == self.steps
        due = last or step == 0 or self.terminal or (step + 1) % max(1, self.steps // (PROGRESS_LINES - 1)) == 0
        if due and (not dist.is_initialized() or dist.get_rank() == 0):  # reading the loss waits for the device
            line = f"{title:8} step {step + 1:>{len(str(self.steps))}}/{self.steps}  loss {loss.item():.4f}"
            self.say("\r" + line if self.terminal else line, end="" if self.terminal and not last else "\n")


@dataclass
class Run:
    """What a training leaves to compare."""

    losses: list[Tensor] = field(default_factory=list)  # of each step, the mean over its batch
    norms: list[Tensor] = field(default_factory=list)  # of each step, of the gradients before clipping
    weights: dict[str, Tensor] = field(default_factory=dict)  # the final ones by FQN, whole and on the CPU
    held: int = 0  # bytes of parameters, gradients and optimizer state in one process between two steps
    peak: int = 0  # the most bytes of one process in a forward and backward; on the CPU, those of live tensors


def train_sharded(job: Job) -> Run:
    """Train with every rank on its own micro-batch. Collective: every rank must call."""
    torch.manual_seed(SEED)
    with init_on_meta():
        model = ByteTransformer(context=CONTEXT)
    plan = plan_model(model)
    job.say(f"\n{plan}\n")
    materialize(shard_model(model, plan=plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    run = _train(job, model, optimizer, "sharded", lambda _: clip_grad_norm_(model, MAX_NORM))
    # Gathering all weights on every rank is fine for a model of this size, and is only needed to compare them.
    run.weights = full_state_dict(model, rank0_only=False)
    return run


def train_plain(job: Job, norms: list[Tensor], device: torch.device) -> Run:
    """Train the same model without shardkit, in this process alone, one micro-batch after the other.

    The gradients are scaled by ``norms``, the sharded run's: norms are sums of many squares and differ in the last
    digits with the order of adding. This run's own are computed in float64, to judge those by.
    """
    torch.manual_seed(SEED)
    model = ByteTransformer(context=CONTEXT).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)

    def clip(step: int) -> Tensor:
        grads = [param.grad.double() for param in model.parameters() if param.grad is not None]
        nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norms[step])
        return nn.utils.get_total_norm(grads)

    run = _train(job, model, optimizer, "plain", clip, parts=range(job.ranks))
    run.weights = {fqn: param.detach().cpu() for fqn, param in model.named_parameters()}
    return run


def resume(job: Job) -> Run:
    """Train the last steps again on other ranks, from the checkpoint. Collective."""
    torch.manual_seed(SEED + 1)  # other weights: what training goes on from is in the checkpoint
    with init_on_meta():
        model = ByteTransformer(context=CONTEXT)
    materialize(shard_model(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)  # likewise
    assert job.folder is not None
    first = load_checkpoint(job.folder / CHECKPOINT, model, optimizer)["step"]
    assert [optimizer.param_groups[0][name] for name in ("lr", "eps")] == [LEARNING_RATE, EPS], "not restored"
    return _train(job, model, optimizer, "resumed", lambda _: clip_grad_norm_(model, MAX_NORM), first)


def _train(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    title: str,
    clip: Callable[[int], Tensor],
    first: int = 0,
    parts: Sequence[int] = (),
) -> Run:
    """Train from step ``first`` on; on ``parts`` of each batch, or on this rank's. Collective, but for ``parts``."""
    run = Run()
    total = len(parts) or dist.get_world_size()
    for step in range(first, job.steps):
        batch, mean = job.batch(step), torch.zeros((), device=next(model.parameters()).device)
        optimizer.zero_grad()
        for part in parts or [dist.get_rank()]:
            with measured(run, step == job.steps - 1, model, optimizer):
                loss = _loss(model, batch, part, total)
                (loss / max(1, len(parts))).backward()  # type: ignore[no-untyped-call]
            mean += loss.detach() / total
        if not parts:
            dist.all_reduce(mean)
        run.norms.append(clip(step))
        optimizer.step()
        run.losses.append(mean)
        job.show_progress(title, step, mean)
        if title == "sharded" and job.folder is not None and step + 1 == job.saved_after:
            save_checkpoint(job.folder / CHECKPOINT, model, optimizer, extra={"step": step + 1})
    report = memory_report(model, optimizer).measured
    run.held = sum(report[name] for name in ("parameters", "gradients", "optimizer"))
    return run


def _loss(model: nn.Module, batch: Tensor, part: int, parts: int) -> Tensor:
    """Cross-entropy of the next byte, in nats, of one part of a batch; the mean over the parts is that of the batch."""
    tokens = batch.tensor_split(parts)[part].to(next(model.parameters()).device)
    total = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return total * (parts / batch[:, 1:].numel())


@contextmanager
def measured(run: Run, wanted: bool, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Where ``wanted``, note in ``run.peak`` the most bytes that the process holds in this context."""
    if not wanted:
        yield
    elif next(model.parameters()).is_cuda:
        torch.cuda.reset_peak_memory_stats()
        yield
        run.peak = max(run.peak, torch.cuda.max_memory_allocated())
    else:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
        with LivePeak([*model.parameters(), *grads, *state]) as live:
            yield
        run.peak = max(run.peak, live.peak)


class LivePeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this context ``peak`` is the most bytes that tensors held at once on the CPU, looked at after each operation.

    Counted are the storages of ``held`` and of all that operations return while it lives. Sizes are asked for anew,
    since FSDP2 frees what it gathered by resizing its storage to 0, which ``shardkit.memory``'s meter does not see.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._kept = [self._add(tensor) for tensor in held]
        self.peak = 0
        self._look()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, then look."""
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self._add(each)
        self._look()
        return out

    def _add(self, tensor: Tensor) -> torch.UntypedStorage:
        storage = (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = id(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))
        return storage

    def _look(self) -> None:
        alive = [storage() for storage in list(self._storages.values())]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))
