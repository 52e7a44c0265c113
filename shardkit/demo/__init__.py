"""``python -m shardkit demo``: train a small transformer sharded and plain, and compare.

Read ``model`` (the model and its text), then ``train`` (the three trainings and their comparison).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardkit.apply.mesh import ensure_process_group
from shardkit.demo.train import MOST_STEPS, OUTPUT, Job, compare_resumed, is_exact, resume, train_and_compare
from shardkit.errors import ShardkitError
from shardkit.memory.report import positive
from shardkit.testing import RankPool

_NEXT = """Next:
  python -m shardkit demo --ranks 4
  torchrun --nproc-per-node 2 -m shardkit demo
  docs/tutorial.md, to shard your own model"""

_FAILED = """The sharded and the plain training differ by more than rounding allows.
  Please report this with the lines above and the output of `python -m shardkit env`."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Return the parser of the command, added to ``commands``, the result of ``ArgumentParser.add_subparsers``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="train a small transformer sharded and plain, and compare",
        description="Shard a small byte-level transformer, train it on Python's own sources, and check it against "
        "the same model trained without sharding. Under torchrun its ranks are used, else they are started here.",
    )
    parser.add_argument("--ranks", type=positive, help="processes to start (default: one for each GPU, else 2)")
    parser.add_argument("--steps", type=positive, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the demo and return the exit code: 0 when the sharded training equals the plain one, else 1.

    Where it starts the ranks itself, the last steps are then trained again from a checkpoint, on another number of
    ranks, which must give the same losses too.

    Raises:
        ShardkitError: more ranks than GPUs, no GPU for ``"cuda"``, ``ranks`` other than torchrun's, more steps than
            rounding leaves comparable, or a rank failed.
    """
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks, here and in the ranks
    gpus = torch.cuda.device_count()
    launched = "RANK" in os.environ or "WORLD_SIZE" in os.environ  # by torchrun
    job = Job(int(os.environ.get("WORLD_SIZE", 0)) or options.ranks or gpus or 2, options.steps)
    problem, fix = "", "Leave it out"
    if options.device == "cuda" and not gpus:
        problem = "--device is cuda, and torch sees no GPU"
    elif launched and options.ranks not in (None, job.ranks):
        problem = f"--ranks is {options.ranks}, and torchrun started {job.ranks}"
    elif not launched and 0 < gpus < job.ranks:
        problem, fix = f"--ranks is {job.ranks}, and torch sees {gpus} GPUs", f"Use --ranks {gpus} or --device cpu"
    elif job.steps > MOST_STEPS and not is_exact("cuda" if gpus else "cpu", job.ranks):
        where = "GPUs" if gpus else f"{job.ranks} ranks"
        problem = f"--steps is {job.steps}, and gradients on {where} are summed in another order than without sharding"
        fix = f"Use at most {MOST_STEPS}, until which the rounding stays small"
    if problem:
        raise ShardkitError(f"{problem}. {fix}.")
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
    with tempfile.TemporaryDirectory(prefix="shardkit-demo-") as folder:
        in_folder = replace(job, folder=Path(folder))
        losses = _pooled(in_folder, job.ranks, gpus, train_and_compare)
        others = job.ranks + 1 if not gpus or job.ranks < gpus else job.ranks - 1
        if losses is None or job.steps == 1 or not others:
            return losses is not None
        job.say(f"\nThe checkpoint of {job.ranks} ranks, on {others}:")
        check = compare_resumed(_pooled(in_folder, others, gpus, resume), losses[job.saved_after :])
        job.say(f"\nResumed against uninterrupted:\n{check}")
        return check.holds


def _pooled(job: Job, ranks: int, gpus: int, body: Callable[[Job], Any]) -> Any:
    """Return what ``body(job)`` returns on rank 0 of ``ranks`` new processes; print what it says meanwhile."""
    assert job.folder is not None
    output, done = job.folder / OUTPUT, threading.Event()
    output.write_text("")

    def follow() -> None:  # a pool shows its ranks' output only at the end
        with output.open() as file:
            while not done.wait(0.1):
                print(file.read(), end="", flush=True)
            print(file.read(), end="", flush=True)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        with RankPool(ranks, backend="nccl" if gpus else "gloo", timeout=24 * 3600) as pool:  # slow is not stuck
            return pool.run(body, job)[0]
    finally:
        done.set()
        thread.join()


def leave(code: int) -> NoReturn:
    """Exit a rank of torchrun once all are done.

    Not by the interpreter's ordinary exit: on a busy machine about one in ten of those aborts in torch 2.13 with
    "terminate called without an active exception", as the gloo group is destroyed; also in scripts without shardkit.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
