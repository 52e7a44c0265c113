"""One case beside another: figures of the same run, round by round."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.train.records import Record, measured


@dataclass(frozen=True)
class Ratio:
    """A median, and the smallest and largest over rounds. One that has no rounds has three times
    the same.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        spread = f" ({self.low:.3f} to {self.high:.3f})" if self.low != self.high else ""
        return f"{self.median:.3f}x{spread}"


def comparable(ours: Record | None, other: Record | None) -> bool:
    """Whether both were measured, by the same process, and their losses do not contradict each
    other.
    """
    if ours is None or other is None or not (measured(ours) and measured(other)):
        return False
    agreements = [record.get("agreement") or {} for record in (ours, other)]
    return ours["run"] == other["run"] and all(
        each.get("holds") is not False for each in agreements
    )


def throughput(ours: Record | None, other: Record | None) -> Ratio | None:
    """Tokens a second of ours over the other's; both take the same tokens a step."""
    if ours is None or other is None or not comparable(ours, other) or not ours.get("seconds"):
        return None
    pairs = zip(ours["seconds"], other["seconds"], strict=False)
    each = [statistics.median(theirs) / statistics.median(mine) for mine, theirs in pairs]
    return Ratio(statistics.median(each), min(each), max(each)) if each else None


def memory(ours: Record | None, other: Record | None, which: str) -> Ratio | None:
    """``"allocated"`` or ``"reserved"`` of ours over the other's; None on a CPU."""
    if (
        ours is None
        or other is None
        or not comparable(ours, other)
        or not (ours.get(which) and other.get(which))
    ):
        return None
    value = ours[which] / other[which]
    return Ratio(value, value, value)


def pairs(values: list[list[float]]) -> Ratio:
    """First over second of alternating measurements."""
    each = [ours / theirs for ours, theirs in values]
    return Ratio(statistics.median(each), min(each), max(each))
