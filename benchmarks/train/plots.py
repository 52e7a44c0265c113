"""Pictures of a folder of results. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.train.records import Record, case_of, measured

Records = Mapping[str, Record]
GIB, MIB = 2**30, 2**20
BLUE, ORANGE, GRAY = "#0072B2", "#E69F00", "#BBBBBB"


def draw(folder: Path, known: Records) -> list[str]:
    """Draw what the records have something for, and return the files' names."""
    rows = [record for record in known.values() if measured(record) and record.get("step")]
    drawn = []
    for name, make in PICTURES.items():
        figure = make(rows)
        if figure is not None:
            figure.savefig(folder / f"{name}.png")
            drawn.append(f"{name}.png")
    return drawn


def mfu(rows: list[Record]) -> Figure | None:
    """Bars of MFU under both conventions."""
    rows = [row for row in rows if row.get("mfu")]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: -row["mfu"]["full"])
    bars = {name: [100 * row["mfu"][name] for row in rows] for name in ("full", "causal")}
    names = {"full": "non-causal, as public figures count", "causal": "causal"}
    named = {names[name]: values for name, values in bars.items()}
    figure = _bars(
        rows, named, "MFU, % of the dense bf16 peak; pale: a ceiling without communication"
    )
    for bars_of_kind in figure.axes[0].containers:
        for bar, row in zip(bars_of_kind, rows, strict=True):
            bar.set_alpha(
                0.4 if row["world"]["kind"] == "fake" and row["case"]["side"] != "bare" else 1.0
            )
    return figure


def memory(rows: list[Record]) -> Figure | None:
    """Bars of peak memory."""
    rows = [row for row in rows if row.get("allocated")]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: (row["case"]["model"], row["allocated"]))
    bars = {name: [row[name] / GIB for row in rows] for name in ("allocated", "reserved")}
    return _bars(rows, bars, "GiB at the peak of a step")


def timeline(rows: list[Record]) -> Figure | None:
    """Memory through one step."""
    rows = [row for row in rows if row.get("timeline")]
    if not rows:
        return None
    figure, axes = _figure(4.5)
    for row in rows:
        points = row["timeline"]
        places = [index / len(points) for index in range(len(points))]
        axes.plot(places, [point / GIB for point in points], linewidth=1, label=_label(row))
    axes.set_xlabel("operators of one step in order, from the first to the last")
    axes.set_ylabel("GiB allocated")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def micro_batches(rows: list[Record]) -> Figure | None:
    """Throughput against micro-batch, a line for everything else that is the same."""
    lines: dict[tuple[object, ...], list[tuple[int, float, Record]]] = {}
    for row in rows:
        case = case_of(row)
        same = {
            name: value
            for name, value in row["case"].items()
            if name not in ("name", "micro_batch")
        }
        point = (case.micro_batch, row["tokens_per_second_per_gpu"], row)
        lines.setdefault(tuple(same.values()), []).append(point)
    shown = [sorted(points, key=lambda point: point[0]) for points in lines.values()]
    shown = [points for points in shown if len({point[0] for point in points}) > 1]
    if not shown:
        return None
    figure, axes = _figure(4.5)
    for points in shown:
        row = points[0][2]
        label = f"{row['case']['model']}, {row['case']['side']}, {_world(row)}"
        axes.plot(
            [point[0] for point in points], [point[1] for point in points], marker="o", label=label
        )
    axes.set_xlabel(f"micro-batch, rows of {shown[0][0][2]['case']['sequence']:,} tokens")
    axes.set_ylabel("tokens/s of a rank")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


PICTURES: dict[str, Callable[[list[Record]], Figure | None]] = {
    "mfu": mfu,
    "memory": memory,
    "timeline": timeline,
    "micro_batches": micro_batches,
}


def _bars(rows: list[Record], bars: Mapping[str, Iterable[float]], label: str) -> Figure:
    figure, axes = _figure(1.0 + 0.36 * len(rows))
    height = 0.8 / len(bars)
    for place, (name, values) in enumerate(bars.items()):
        color = (BLUE, ORANGE, GRAY)[place]
        axes.barh(
            [at + place * height for at in range(len(rows))],
            list(values),
            height,
            color=color,
            label=name,
        )
    axes.set_yticks(
        [at + 0.4 - height / 2 for at in range(len(rows))], [_label(row) for row in rows]
    )
    axes.set_ylim(len(rows), -0.5)
    axes.set_xlabel(label)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(bars))
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, height), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _label(row: Record) -> str:
    """Every bar says in which world it was measured."""
    return f"{row['name']}  [{_world(row)}]"


def _world(row: Record) -> str:
    return "not sharded" if row["case"]["side"] == "bare" else str(row["world"]["label"])
