"""stop_requested: SIGTERM on one rank ends the loop after the same step on all."""

import multiprocessing
import os
import signal
import time

import torch.distributed as dist
from cpu_ranks import on_ranks

from shardkit.checkpoint import stop, stop_requested


@on_ranks(2)
def test_sigterm_on_one_rank_ends_the_loop_after_the_same_step_on_all(monkeypatch):
    monkeypatch.setattr(stop, "_received", 0)
    handler, step = signal.getsignal(signal.SIGTERM), 0
    try:
        while step < 9 and not stop_requested():
            step += 1
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        assert step == 3
        os.kill(os.getpid(), signal.SIGTERM)  # a second one, as of torchrun after SLURM's
        assert stop_requested()
    finally:
        signal.signal(signal.SIGTERM, handler)


def wait(ready):
    ready.set()
    time.sleep(60)


def test_a_fork_of_the_process_ends_on_sigterm_as_ever():
    handler, context = signal.getsignal(signal.SIGTERM), multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=wait, args=(ready,))
    try:
        stop_requested()
        child.start()
        ready.wait(30)
        child.terminate()
        child.join(30)
        assert child.exitcode == -signal.SIGTERM
    finally:
        child.kill()
        signal.signal(signal.SIGTERM, handler)
