"""Where two runs first differ: ``python -m shardkit compare a.jsonl b.jsonl``."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardkit.errors import ShardkitError, message


@dataclass(frozen=True)
class Divergence:
    """Where two runs, or two ranks, first differ; prints as a line."""

    step: int | None  # from 1; None between ranks
    at: str  # the FQN of a module or parameter, or a setting
    what: str  # "forward", "backward", "gradient" or "parameter"; between ranks, which ones
    call: int  # the number of the module's output in the step, from 1
    distance: float  # at least the relative L2 distance of the tensors; inf for a nan, other elements, or a setting
    tolerance: float  # which it exceeds

    def __str__(self) -> str:
        where = f"step {self.step}, {self.what} of {self.at}" if self.step is not None else f"{self.at} {self.what}"
        call = f", output {self.call}" if self.call > 1 else ""
        return f"{where}{call}: at least {self.distance:.1e} apart (relative; tolerance {self.tolerance:.1e})"


def distance(a: Any, b: Any) -> float:
    """Return a lower bound of ``|x - y| / max(|x|, |y|)`` from two digests, in the L2 norm; inf for anything else.

    By Cauchy and Schwarz, sums with weights of at most 1 over n elements differ by at most ``sqrt(n) * |x - y|``.
    """
    if not isinstance(a, list) or not isinstance(b, list) or a[0] != b[0] or not all(map(math.isfinite, a + b)):
        return 0.0 if repr(a) == repr(b) else math.inf
    norms = [math.sqrt(max(each[3], 0.0)) for each in (a, b)]
    sums = max(abs(x - y) for x, y in zip(a[1:3], b[1:3], strict=True)) / math.sqrt(a[0] or 1.0)
    return float(max(sums, abs(norms[0] - norms[1])) / (max(norms) or 1.0))


def compare_runs(dump_a: str | Path, dump_b: str | Path, tolerance: float | None = None) -> Divergence | None:
    """Return where two files of :func:`record_run` first differ, in the order of the first; None if nowhere. Local.

    Args:
        dump_a: the file of one run.
        dump_b: of the other: another world, FSDP1, another version. Steps and modules that one lacks are not compared.
        tolerance: of :attr:`Divergence.distance`; None is the resolution of the dtype (float32: 1.2e-7), which rounding
            in another order stays below, until training has amplified it.

    Raises:
        ShardkitError: a file is not one of ``record_run``, or they have no step and module in common.
    """
    a, b = _read(dump_a), _read(dump_b)
    if not a.keys() & b.keys():
        problem = f"finds no step and module that {dump_a} and {dump_b} have in common"
        raise ShardkitError(message("compare_runs", problem, "", "Record both runs from the same model"))
    for key in [key for key in a if key in b]:
        dtypes = [getattr(torch, dtype) for dtype in (a[key][0], b[key][0])]
        coarser = max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0 for dtype in dtypes)
        limit = coarser if tolerance is None else tolerance
        if (far := distance(a[key][1], b[key][1])) > limit:
            return Divergence(*key, far, limit)
    return None


def _read(path: str | Path) -> dict[tuple[int, str, str, int], tuple[str, list[float]]]:
    try:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        return {(row["step"], row["at"], row["what"], row["call"]): (row["dtype"], row["digest"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"is not a file of record_run: {type(error).__name__}: {error}"
        raise ShardkitError(message(str(path), problem, "", "Write it with shardkit.watching.record_run")) from error


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command ``compare``."""
    text = "find where two runs first differ"
    about = "Print the first step and module at which two files of record_run differ; exits with 1 if there is one."
    parser: argparse.ArgumentParser = commands.add_parser("compare", help=text, description=about)
    parser.add_argument("dump", nargs=2, help="a file of record_run")
    parser.add_argument("--tolerance", type=float, help="relative distance to accept (default: the dtype's resolution)")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the first difference; exit code 1 if there is one."""
    first, second = options.dump
    found = compare_runs(first, second, options.tolerance)
    print(found or "no difference")
    return int(found is not None)
