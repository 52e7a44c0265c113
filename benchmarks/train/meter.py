"""Seconds and bytes of training steps on one device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.models import SHAPES
from benchmarks.train.case import Case, Training


def batches(case: Case, device: torch.device, rank: int, first: int, count: int) -> list[Tensor]:
    """Random token ids for steps ``first`` and on, ``(micro_batch, sequence)`` each: the same ones
    on every side.
    """
    words = SHAPES[case.model.removeprefix("hf-")].vocabulary
    shape = (case.micro_batch, case.sequence)
    generators = (
        torch.Generator().manual_seed(1_000_003 * rank + first + step) for step in range(count)
    )
    return [torch.randint(words, shape, generator=each).to(device) for each in generators]


def timed(
    training: Training, ids: list[Tensor], device: torch.device
) -> tuple[list[float], Tensor]:
    """Seconds of each step, and the losses; nothing waits for the GPU between two steps.

    A GPU's seconds lie between CUDA events, the first one recorded on an idle device: what the CPU
    does meanwhile counts where the GPU has to wait for it. A CPU's are those of
    ``time.perf_counter``.
    """
    with collected():
        return (
            _timed_on_cpu(training, ids)
            if device.type == "cpu"
            else _timed_on_gpu(training, ids, device)
        )


def _timed_on_gpu(
    training: Training, ids: list[Tensor], device: torch.device
) -> tuple[list[float], Tensor]:
    gpu = torch.get_device_module(device)
    marks = [gpu.Event(enable_timing=True) for _ in range(len(ids) + 1)]
    losses = []
    gpu.synchronize()
    marks[0].record()
    for each, mark in zip(ids, marks[1:], strict=True):
        losses.append(training.step(each))
        mark.record()
    gpu.synchronize()
    seconds = [first.elapsed_time(last) / 1e3 for first, last in pairwise(marks)]
    return seconds, torch.stack(losses)


def _timed_on_cpu(training: Training, ids: list[Tensor]) -> tuple[list[float], Tensor]:
    marks, losses = [time.perf_counter()], []
    for each in ids:
        losses.append(training.step(each))
        marks.append(time.perf_counter())
    return [last - first for first, last in pairwise(marks)], torch.stack(losses)


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage now and not inside: a collection over all that is imported takes as long as a
    small step.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def peak(device: torch.device, done: Callable[[int | None, int | None], None]) -> Iterator[None]:
    """Call ``done`` with the most bytes that were allocated and reserved inside, both None on a
    CPU.
    """
    if device.type == "cpu":
        yield
        done(None, None)
        return
    gpu = torch.get_device_module(device)
    gpu.synchronize()
    gpu.reset_peak_memory_stats(device)
    yield
    gpu.synchronize()
    done(gpu.max_memory_allocated(device), gpu.max_memory_reserved(device))


def held(device: torch.device) -> int | None:
    """Bytes that are allocated now; None on a CPU."""
    return (
        None
        if device.type == "cpu"
        else int(torch.get_device_module(device).memory_allocated(device))
    )


def free(device: torch.device) -> int | None:
    """Give back what nothing refers to any more, compiled code among it. Returns the bytes that
    stay.
    """
    # or blocks of an earlier case count towards dynamo's limit of recompilations
    torch.compiler.reset()
    gc.collect()  # a sharded model is in reference cycles
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
        torch.get_device_module(device).empty_cache()
    return held(device)
