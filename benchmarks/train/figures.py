"""The figures to reach on one H200: what, which goal, and what was measured, or
that nothing was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.train import ratios
from benchmarks.train.records import Record, measured

NOT_YET = "not yet measured"
Records = Mapping[str, Record]
Found = tuple[float, str]


@dataclass(frozen=True)
class Figure:
    """A line of the table.

    Attributes:
        what: is measured.
        least: whether the goal is a least or a most.
        goal: the bound.
        unit: ``"x"`` or ``"%"``.
        find: the value and its text; None if the records do not have it.
    """

    what: str
    least: bool
    goal: float
    unit: str
    find: Callable[[Records], Found | None]

    def row(self, records: Records) -> list[str]:
        """Cells: what, goal, measured, whether it is reached."""
        goal = (
            f"{'>=' if self.least else '<='} "
            f"{f'{self.goal:g} %' if self.unit == '%' else f'{self.goal:.2f}x'}"
        )
        found = self.find({name: each for name, each in records.items() if on_gpu(each)})
        if found is None:
            return [self.what, goal, NOT_YET, ""]
        value, text = found
        return [
            self.what,
            goal,
            text,
            "yes" if (value >= self.goal if self.least else value <= self.goal) else "no",
        ]


def on_gpu(record: Record) -> bool:
    """Whether a record was measured on a GPU; nothing else fills this table."""
    return measured(record) and record["machine"]["device"] == "cuda"


def _speed(ours: str, other: str) -> Callable[[Records], Found | None]:
    return lambda records: _found(ratios.throughput(records.get(ours), records.get(other)))


def _bytes(ours: str, other: str, which: str) -> Callable[[Records], Found | None]:
    return lambda records: _found(ratios.memory(records.get(ours), records.get(other), which))


def _found(ratio: ratios.Ratio | None) -> Found | None:
    return None if ratio is None else (ratio.median, str(ratio))


def _mfu(group: str) -> Callable[[Records], Found | None]:
    """The best case of a group; the goal is in the convention of public figures, the other one
    stands beside it.
    """

    def find(records: Records) -> Found | None:
        rows = [each for each in records.values() if each["group"] == group and each.get("mfu")]
        if not rows:
            return None
        best = max(rows, key=lambda each: each["mfu"]["full"])["mfu"]
        return 100 * best["full"], f"{best['full']:.1%} (causal: {best['causal']:.1%})"

    return find


def _outside(records: Records) -> Found | None:
    record = records.get("outside")
    return None if record is None else _found(ratios.pairs(record["values"]))


def _disk(ours: str, limits: tuple[str, ...]) -> Callable[[Records], Found | None]:
    def find(records: Records) -> Found | None:
        record = records.get("disk")
        if record is None:
            return None
        values = record["values"]
        limit = min(values[name] for name in limits)
        return values[
            ours
        ] / limit, f"{values[ours] / limit:.2f}x ({values[ours]:.2f} of {limit:.2f} GB/s)"

    return find


FIGURES = (
    Figure(
        "8B, fake 8: throughput of shardkit / FSDP2 by an expert",
        True,
        0.99,
        "x",
        _speed("8b-shardkit", "8b-expert"),
    ),
    Figure(
        "8B, fake 8: peak allocated of shardkit / FSDP2 by an expert",
        *(False, 1.0, "x"),
        _bytes("8b-shardkit", "8b-expert", "allocated"),
    ),
    Figure(
        "1B, fake 8: throughput of shardkit / FSDP2 by an expert",
        True,
        0.99,
        "x",
        _speed("1b-shardkit", "1b-expert"),
    ),
    Figure(
        "1B, fake 8: peak allocated of shardkit / FSDP2 by an expert",
        *(False, 1.0, "x"),
        _bytes("1b-shardkit", "1b-expert", "allocated"),
    ),
    Figure(
        "8B, fake 8, 512 tokens: peak allocated of shardkit / blocks and root",
        *(False, 0.95, "x"),
        _bytes("8b-512-shardkit", "8b-512-naive", "allocated"),
    ),
    Figure(
        "8B, fake 8, 4,096 tokens: peak allocated of shardkit / blocks and root",
        *(False, 0.95, "x"),
        _bytes("8b-shardkit", "8b-naive", "allocated"),
    ),
    Figure(
        "8B, fake 8: peak reserved of shardkit / FSDP1 FULL_SHARD",
        *(False, 0.93, "x"),
        _bytes("8b-shardkit", "8b-fsdp1", "reserved"),
    ),
    Figure(
        "8B, fake 8: throughput of shardkit / FSDP1 FULL_SHARD",
        True,
        1.05,
        "x",
        _speed("8b-shardkit", "8b-fsdp1"),
    ),
    Figure("8B, bf16, float32 masters, compiled, 1 rank: MFU", True, 55.0, "%", _mfu("8b-one")),
    Figure("1B, bf16, float32 masters, compiled, 1 rank: MFU", True, 50.0, "%", _mfu("1b-one")),
    Figure(
        "8B as KempnerForge ran it, no float32 masters, 1 rank: MFU",
        True,
        54.5,
        "%",
        _mfu("8b-kempner"),
    ),
    Figure(
        "Llama 2 7B as thunder ran it, no float32 masters, fake 8: MFU",
        True,
        58.2,
        "%",
        _mfu("7b-thunder"),
    ),
    Figure(
        "1B, 16k tokens: throughput at fake 8 / bare bf16 model",
        True,
        0.95,
        "x",
        _speed("1b-shardkit", "1b-bare"),
    ),
    Figure(
        "CPU time of a step outside the model: shardkit / by hand, torch's clip and AdamW",
        False,
        0.6,
        "x",
        _outside,
    ),
    Figure(
        "8B: streaming load / what disk and bus give in the same run",
        True,
        0.8,
        "x",
        _disk("load", ("read", "to_gpu")),
    ),
    Figure(
        "8B: direct save / what disk and bus give in the same run",
        True,
        0.8,
        "x",
        _disk("save", ("write", "from_gpu")),
    ),
)


def table(records: Records) -> str:
    """All of them in Markdown."""
    rows = [figure.row(records) for figure in FIGURES]
    lines = ["| what | goal | measured | reached |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])
