"""What the GPU gives at most in this run: a large matrix product and a large copy. MFU is not
divided by these.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

TIMES = 10


def measure(device: torch.device) -> dict[str, float]:
    """Operations a second of a product in bfloat16, and bytes read and written a second of a copy
    on the device.

    Random numbers, as zeros run faster on a GPU. On a CPU both are small, and only show that this
    runs.
    """
    cuda = device.type == "cuda"
    side, count = (8192, 2**30) if cuda else (128, 2**16)
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    product = _seconds(lambda: left @ right, device)
    copy = _seconds(lambda: target.copy_(source), device)
    return {
        "bf16_product_tflops": 2 * side**3 / product / 1e12,
        "copy_gb_per_s": 2 * source.nbytes / copy / 1e9,
    }


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        work()
    return statistics.median(_once(work, device) for _ in range(TIMES))


def _once(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    marks[0].record()
    work()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) / 1e3
