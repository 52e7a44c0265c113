"""Starting ranks on this machine: without torchrun, and without a port."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn


def run_on_ranks(body: Callable[[], int], ranks: int) -> int:
    """Run ``body()`` in ``ranks`` new processes that form a process group, and wait for all of them.

    The processes end with this one, however it ends. When one fails, the others are stopped.

    Args:
        body: picklable. A rank fails by what it raises, or by returning 1 after it has said why.
        ranks: how many; on CUDA each takes the GPU of its number.

    Returns:
        0 if every rank did, else 1, after printing which rank raised, with its traceback.
    """
    # A new process imports torch before shardkit, which keeps torch from saying that numpy is missing.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy")
    with tempfile.TemporaryDirectory(prefix="shardkit-demo-") as folder:
        try:
            # daemon: multiprocessing ends them when this process exits, as by Ctrl-C.
            spawn(  # type: ignore[no-untyped-call]
                _rank, args=(body, ranks, str(Path(folder, "rendezvous"))), nprocs=ranks, daemon=True
            )
        except ProcessRaisedException as failure:
            print(f"rank {failure.error_index} failed:\n{failure}", file=sys.stderr)
            return 1
        except ProcessExitedException as failure:
            if failure.exit_code != 1:
                print(f"rank {failure.error_index} failed: {failure}", file=sys.stderr)
            return 1
    return 0


def _rank(rank: int, body: Callable[[], int], ranks: int, rendezvous: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.FileStore(rendezvous, ranks),  # type: ignore[attr-defined]  # public, but not in __all__
        rank=rank,
        world_size=ranks,
    )
    leave(body())


def leave(code: int) -> NoReturn:
    """End a rank that is done, once all are.

    Not by the interpreter's ordinary exit: on a busy machine about one in ten of those aborts in torch 2.13 with
    "terminate called without an active exception", as the gloo group is taken down; also in scripts without shardkit.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
