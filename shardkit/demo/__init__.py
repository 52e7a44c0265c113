"""``python -m shardkit demo``: train a small transformer sharded and plain, and compare.

Read ``model`` (the model), ``train`` (the two trainings, the point of it all), ``verify`` (what must agree), ``resume``
(the checkpoint of one world, in another), then ``launch``, ``console`` and ``text``, which only serve them.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardkit.apply.mesh import ensure_process_group
from shardkit.demo.console import say
from shardkit.demo.launch import leave, run_on_ranks
from shardkit.demo.resume import LOSSES, resume
from shardkit.demo.text import load_text
from shardkit.demo.train import Job, Run, train_plain, train_sharded
from shardkit.demo.verify import MOST_STEPS, compare, is_exact
from shardkit.errors import ShardkitError, message

_LAUNCHED = ("RANK", "WORLD_SIZE")  # torchrun sets them


def run_demo(*, ranks: int | None = None, steps: int = 60, device: str | None = None) -> int:
    """Run the demo and return the exit code: 0 when the sharded training equals the plain one, else 1.

    Where it starts the ranks itself, the last steps are then trained again from a checkpoint, on another number of
    ranks, which must give the same losses too.

    Args:
        ranks: processes to start; None is one for each GPU, or 2 on the CPU. Under torchrun its ranks are used.
        steps: of the optimizer.
        device: ``"cpu"`` or ``"cuda"``; None is CUDA where there is a GPU.

    Raises:
        ShardkitError: more ranks than GPUs, no GPU for ``"cuda"``, ``ranks`` other than torchrun's, or so many steps
            that rounding hides what is to be seen.
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks, here and in the ranks
    gpus = torch.cuda.device_count()
    launched = any(name in os.environ for name in _LAUNCHED)
    _check(ranks, device, gpus, launched)
    _check_steps(steps, gpus, int(os.environ.get("WORLD_SIZE", 0)) or ranks or gpus or 2)
    started = time.perf_counter()
    if launched:
        ensure_process_group()
        return leave(_told(_train_and_compare(steps, None), started))
    return _told(_train_and_resume(steps, ranks or gpus or 2, gpus), started)


def _train_and_resume(steps: int, ranks: int, gpus: int) -> int:
    with tempfile.TemporaryDirectory(prefix="shardkit-demo-") as name:
        folder = Path(name)
        code = run_on_ranks(functools.partial(_train_and_compare, steps, folder), ranks)
        others = ranks + 1 if not gpus or ranks < gpus else ranks - 1
        if code or steps == 1 or not others:
            return code
        return run_on_ranks(functools.partial(resume, folder, steps, ranks), others)


def _told(code: int, started: float) -> int:
    """The exit code, after saying what it means."""
    say(f"\n{time.perf_counter() - started:.0f} s. {_FAILED if code else _NEXT}")
    return code


def _check(ranks: int | None, device: str | None, gpus: int, launched: bool) -> None:
    started = os.environ.get("WORLD_SIZE")
    parts = None
    if device == "cuda" and not gpus:
        parts = ("--device", "cuda, and torch sees no GPU", "CUDA needs one", "Leave it out to use the CPU")
    elif launched and ranks is not None and str(ranks) != started:
        parts = ("--ranks", f"{ranks}, and torchrun started {started}", "torchrun decides", "Leave it out")
    elif not launched and gpus and (ranks or 0) > gpus:
        fix = f"Use --ranks {gpus} or --device cpu"
        parts = ("--ranks", f"{ranks}, and torch sees {gpus} GPUs", "Each rank has a GPU of its own", fix)
    if parts:
        raise ShardkitError(message(*parts))


def _check_steps(steps: int, gpus: int, ranks: int) -> None:
    if steps > MOST_STEPS and not is_exact("cuda" if gpus else "cpu", ranks):
        where = "on GPUs" if gpus else f"on {ranks} ranks"
        rule = "Gradients are added in another order than without sharding there, and the rounding grows step by step"
        raise ShardkitError(message("--steps", f"{steps} {where}", rule, f"Use at most {MOST_STEPS}"))


def _train_and_compare(steps: int, folder: Path | None) -> int:
    # Products of matrices may differ in the last digit between numbers of threads, and ranks share the cores.
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    job = Job(load_text(), device, dist.get_world_size(), steps, folder)
    say(
        f"shardkit demo: {job.ranks} rank{'s' * (job.ranks > 1)} on {device.type}, {steps} steps on "
        f"{len(job.text) / 2**20:.1f} MiB of Python's own sources"
    )
    sharded = train_sharded(job)
    held, peaks = _of_all_ranks(sharded.held, job), _of_all_ranks(sharded.peak, job)
    if dist.get_rank() != 0:
        return 0
    gc.collect()  # the sharded model is in reference cycles
    plain = train_plain(job, sharded.norms)
    checks = compare(job, sharded, plain)
    say("\nSharded against plain, the largest difference over all steps and all elements:")
    say("\n".join(map(str, checks)))
    say(_memory(held, peaks, plain, device))
    if folder is not None:
        (folder / LOSSES).write_text(json.dumps([loss.item() for loss in sharded.losses]))
    return 0 if all(check.holds for check in checks) else 1


_NEXT = """Next:
  python -m shardkit demo --ranks 4
  torchrun --nproc-per-node 2 -m shardkit demo
  docs/tutorial.md, to shard your own model"""

_FAILED = """The two trainings differ by more than they may.
  Please report this with the lines above, your processor or GPU, and what `python -c "import torch;
  print(torch.__version__)"` prints."""


def _memory(held: list[int], peaks: list[int], plain: Run, device: torch.device) -> str:
    how = "torch.cuda.max_memory_allocated" if device.type == "cuda" else "bytes of live tensors"
    return "\n".join(
        (
            "\nParameters, gradients and AdamW's state between two steps:",
            f"  {_mib(held)} on each rank, {_mib([plain.held])} unsharded",
            f"Peak of a forward and backward of one micro-batch, activations included ({how}):",
            f"  {_mib(peaks)} on each rank, {_mib([plain.peak])} unsharded",
        )
    )


def _mib(sizes: list[int]) -> str:
    shown = sorted({f"{size / 2**20:.2f}" for size in sizes}, key=float)
    return f"{' to '.join((shown[0], shown[-1])) if len(shown) > 1 else shown[0]} MiB"


def _of_all_ranks(value: int, job: Job) -> list[int]:
    """``value`` of every rank, in the order of ranks. Collective."""
    values = torch.zeros(job.ranks, dtype=torch.int64, device=job.device)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return [int(each) for each in values.tolist()]
