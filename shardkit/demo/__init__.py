"""``python -m shardkit demo``: train a small transformer sharded and plain, and compare.

Read ``model`` (the model), ``train`` (the trainings, the point of it all), then ``verify`` (what must agree).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardkit.apply.mesh import ensure_process_group
from shardkit.demo.model import load_text
from shardkit.demo.train import Job, resume, train_plain, train_sharded
from shardkit.demo.verify import MOST_STEPS, compare, compare_resumed, is_exact
from shardkit.errors import ShardkitError, message
from shardkit.plan.table import nbytes
from shardkit.testing import RankPool

_LAUNCHED = ("RANK", "WORLD_SIZE")  # torchrun sets them
_LIMIT = 24 * 3600.0  # seconds: a slow machine is not a stuck one

_NEXT = """Next:
  python -m shardkit demo --ranks 4
  torchrun --nproc-per-node 2 -m shardkit demo
  docs/tutorial.md, to shard your own model"""

_FAILED = """The two trainings differ by more than they may.
  Please report this with the lines above, your processor or GPU, and what `python -c "import torch;
  print(torch.__version__)"` prints."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The parser of the command, added to ``commands``, which ``ArgumentParser.add_subparsers`` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="train a small transformer sharded and plain, and compare",
        description="Shard a small byte-level transformer, train it on Python's own sources, and check it against "
        "the same model trained without sharding. Under torchrun its ranks are used, else they are started here.",
    )
    parser.add_argument("--ranks", type=_positive, help="processes to start (default: one for each GPU, else 2)")
    parser.add_argument("--steps", type=_positive, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def run(options: argparse.Namespace) -> int:
    """Run the demo and return the exit code: 0 when the sharded training equals the plain one, else 1.

    Where it starts the ranks itself, the last steps are then trained again from a checkpoint, on another number of
    ranks, which must give the same losses too.

    Raises:
        ShardkitError: more ranks than GPUs, no GPU for ``"cuda"``, ``ranks`` other than torchrun's, more steps than
            rounding leaves comparable, or a rank failed.
    """
    ranks, steps, device = options.ranks, options.steps, options.device
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks, here and in the ranks
    gpus = torch.cuda.device_count()
    launched = any(name in os.environ for name in _LAUNCHED)
    _check(ranks, device, gpus, launched)
    job = Job(int(os.environ.get("WORLD_SIZE", 0)) or ranks or gpus or 2, steps, terminal=sys.stdout.isatty())
    _check_steps(steps, gpus, job.ranks)
    started = time.perf_counter()
    if not launched:
        holds = _on_ranks_of_our_own(job, gpus)
    else:
        ensure_process_group()
        job = replace(job, ranks=dist.get_world_size())
        holds = train_and_compare(job) is not None
    job.say(f"\n{time.perf_counter() - started:.0f} s. {_NEXT if holds else _FAILED}")
    return leave(int(not holds)) if launched else int(not holds)


def _on_ranks_of_our_own(job: Job, gpus: int) -> bool:
    # A new process imports torch before shardkit, which keeps torch from saying that numpy is missing.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy")
    with tempfile.TemporaryDirectory(prefix="shardkit-demo-") as name:
        job = replace(job, folder=Path(name), output=Path(name, "output"))
        losses = _pooled(job, job.ranks, gpus, train_and_compare)
        others = job.ranks + 1 if not gpus or job.ranks < gpus else job.ranks - 1
        if losses is None or job.steps == 1 or not others:
            return losses is not None
        print(f"\nThe checkpoint of {job.ranks} ranks, on {others}:", flush=True)
        check = compare_resumed(_pooled(job, others, gpus, _resume), losses[job.saved_after :])
        print(f"\nResumed against never stopped:\n{check}", flush=True)
        return check.holds


def _pooled(job: Job, ranks: int, gpus: int, body: Callable[[Job], Any]) -> Any:
    """What ``body(job)`` returns on rank 0 of ``ranks`` new processes."""
    with RankPool(ranks, backend="nccl" if gpus else "gloo", timeout=_LIMIT) as pool, _followed(job.output):
        return pool.run(body, job)[0]


@contextmanager
def _followed(output: Path | None) -> Iterator[None]:
    """Print what is written to the file while the body runs: a pool shows its ranks' output only at the end."""
    assert output is not None
    output.write_text("")
    done = threading.Event()

    def follow() -> None:
        with output.open() as file:
            while not done.wait(0.1):
                print(file.read(), end="", flush=True)
            print(file.read(), end="", flush=True)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def train_and_compare(job: Job) -> list[float] | None:
    """Train twice and show what came of it; the losses, or None where the trainings differ. Collective."""
    # Products of matrices may differ in the last digit between numbers of threads, and ranks share the cores.
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    job.say(
        f"shardkit demo: {job.ranks} rank{'s' * (job.ranks > 1)} on {device.type}, {job.steps} steps on "
        f"{len(load_text()) / 2**20:.1f} MiB of Python's own sources"
    )
    sharded = train_sharded(job)
    most = torch.tensor([sharded.held, sharded.peak], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank() != 0:
        return []
    gc.collect()  # the sharded model is in reference cycles
    plain = train_plain(job, sharded.norms, device)
    checks = compare(device.type, job.ranks, sharded, plain)
    job.say("\nSharded against plain, the largest difference over all steps and all elements:")
    job.say("\n".join(map(str, checks)))
    held, peak = (f"  {nbytes(each)} on each rank, " for each in most.tolist())
    how = "torch.cuda.max_memory_allocated" if device.type == "cuda" else "bytes of live tensors"
    job.say(f"\nParameters, gradients and AdamW's state between two steps:\n{held}{nbytes(plain.held)} unsharded")
    job.say(f"Peak of a forward and backward of one micro-batch, activations included ({how}):")
    job.say(f"{peak}{nbytes(plain.peak)} unsharded")
    return [loss.item() for loss in sharded.losses] if all(check.holds for check in checks) else None


def _resume(job: Job) -> list[float]:
    torch.set_num_threads(1)
    return [loss.item() for loss in resume(job).losses]


def leave(code: int) -> NoReturn:
    """End a rank of torchrun that is done, once all are.

    Not by the interpreter's ordinary exit: on a busy machine about one in ten of those aborts in torch 2.13 with
    "terminate called without an active exception", as the gloo group is taken down; also in scripts without shardkit.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
