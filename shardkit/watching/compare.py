"""Where two runs first differ: ``python -m shardkit compare a.jsonl b.jsonl``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardkit.errors import ShardkitError, message


@dataclass(frozen=True)
class Divergence:
    """Where two runs, or two ranks, first differ.

    Attributes:
        step: from 1; None between ranks.
        at: the FQN of a module or parameter, or a setting.
        what: "forward", "backward", "gradient" or "parameter"; between ranks, which ones.
        call: the number of the module's output in the step, from 1.
        distance: a lower bound of the relative L2 distance of the two tensors; inf if one of them has a nan, other
            elements, or is a setting.
        tolerance: which it exceeds.
    """

    step: int | None
    at: str
    what: str
    call: int
    distance: float
    tolerance: float

    def __str__(self) -> str:
        """One line, as the command prints."""
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
    largest = max(norms)
    if not largest:
        return 0.0
    sums = max(abs(x - y) for x, y in zip(a[1:3], b[1:3], strict=True)) / math.sqrt(a[0])
    return float(max(sums, abs(norms[0] - norms[1])) / largest)


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
        rule, fix = "Runs are compared step by step and module by module", "Record both runs from the same model"
        raise ShardkitError(
            message("compare_runs", f"{dump_a} and {dump_b} have no step and module in common", rule, fix)
        )
    for key, (dtype, found) in a.items():
        other_dtype, other = b.get(key, (dtype, found))
        step, at, what, call = key
        coarser = max(map(_resolution, (dtype, other_dtype)))
        limit = coarser if tolerance is None else tolerance
        if (far := distance(found, other)) > limit:
            return Divergence(step, at, what, call, far, limit)
    return None


def _resolution(dtype: str) -> float:
    kind = getattr(torch, dtype)
    return torch.finfo(kind).eps if kind.is_floating_point else 0.0


def _read(path: str | Path) -> dict[tuple[int, str, str, int], tuple[str, list[float]]]:
    try:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        return {(row["step"], row["at"], row["what"], row["call"]): (row["dtype"], row["digest"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem, rule = (
            f"is not a file of record_run: {type(error).__name__}: {error}",
            "Such a file has a digest on each line, as JSON",
        )
        raise ShardkitError(message(str(path), problem, rule, "Write it with shardkit.record_run")) from error


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
    dumps: Sequence[str] = options.dump
    found = compare_runs(dumps[0], dumps[1], options.tolerance)
    print(found or "no difference")
    return int(found is not None)
