"""``python -m shardkit demo``: train a small transformer sharded and plain, and compare. See
``train``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from shardkit.apply.mesh import ensure_process_group
from shardkit.demo.train import MOST_STEPS, Job, is_exact, train_and_compare
from shardkit.errors import ShardkitError
from shardkit.memory.report import positive

_NEXT = """Next:
  python -m shardkit demo --ranks 4
  torchrun --nproc-per-node 2 -m shardkit demo
  docs/tutorial.md, to shard your own model"""

_FAILED = """The sharded and the plain training differ by more than rounding allows.
  Please report this with the lines above and the output of `python -m shardkit env`."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Return the parser of the command, added to ``commands``, the result of
    ``ArgumentParser.add_subparsers``.
    """
    text = "train a small transformer sharded and plain, and compare"
    about = f"{text.capitalize()}. Under torchrun its ranks are used, else torchrun is started."
    parser: argparse.ArgumentParser = commands.add_parser("demo", help=text, description=about)
    parser.add_argument(
        "--ranks", type=positive, help="processes to start (default: one for each GPU, else 2)"
    )
    parser.add_argument(
        "--steps", type=positive, default=60, help="optimizer steps (default: %(default)s)"
    )
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the demo and return the exit code: 0 when the sharded training equals the plain one, else
    1.

    Raises:
        ShardkitError: more ranks than GPUs, or more steps than rounding leaves comparable.
    """
    started = time.perf_counter()
    gpus = torch.cuda.device_count()
    launched = "WORLD_SIZE" in os.environ  # by torchrun
    ranks = int(os.environ["WORLD_SIZE"]) if launched else options.ranks or gpus or 2
    job = Job(ranks, options.steps)
    if not launched and 0 < gpus < job.ranks:
        raise ShardkitError(
            f"--ranks is {job.ranks}, and torch sees {gpus} GPUs. "
            "Set CUDA_VISIBLE_DEVICES= for CPUs."
        )
    if job.steps > MOST_STEPS and not is_exact("cuda" if gpus else "cpu", job.ranks):
        raise ShardkitError(
            f"--steps is {job.steps}, and gradients are summed in another order than without "
            f"sharding. Use at most {MOST_STEPS}, until which the rounding stays small."
        )
    if not launched:
        return _start_torchrun(job)
    ensure_process_group()
    holds = train_and_compare(job)
    job.say(f"\n{time.perf_counter() - started:.0f} s. {_NEXT if holds else _FAILED}")
    leave(int(not holds))
    return int(not holds)


def _start_torchrun(job: Job) -> int:
    """Run the demo on ranks of this host, and return their exit code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    demo = ["-m", "shardkit", "demo", "--steps", str(job.steps)]
    # Else torchrun warns that each rank has one thread, and torch that there is no numpy.
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:Failed to initialize NumPy"}
    command = [*torchrun, f"--nproc-per-node={job.ranks}", *demo]
    return subprocess.run(command, env={**quiet, **os.environ}).returncode


def leave(code: int) -> None:
    """Exit a rank of torchrun once all are done.

    On a busy machine one in ten ordinary exits of any gloo script aborts with "terminate called
    ..." (torch 2.13).
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
