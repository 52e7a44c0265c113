"""Where a step's time goes, unit by unit, from a trace of torch.profiler.

    torchrun --nproc-per-node 2 train.py config.yaml profile=5
    python units.py runs/trace-rank0.json step.png

FSDP2 records what it does with the unit's name, such as ``FSDP::all_gather (layers.0)``.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

RECORD = re.compile(r"FSDP::(\w+)(?: \((.+?)\))?(?: \[pg=\d+\])?$")  # the root's have no name
COLUMNS = {  # these records do not contain one another; others, such as pre_forward, contain them
    "gather": "all_gather",
    "copy out": "all_gather_copy_out",
    "reduce": "post_backward_reduce",
    "wait": "post_backward_rs_wait",
}


def records(path):
    """Yield the start and duration in ms, the column and the unit of every record, in order."""
    names = {action: column for column, action in COLUMNS.items()}
    events = [
        event
        for event in json.loads(Path(path).read_text())["traceEvents"]
        if event.get("ph") == "X"
    ]
    began = min(event["ts"] for event in events)
    for event in sorted(events, key=lambda event: event["ts"]):
        found = RECORD.match(event["name"]) if event.get("cat") == "user_annotation" else None
        if found and found[1] in names:
            yield (
                (event["ts"] - began) / 1e3,
                event["dur"] / 1e3,
                names[found[1]],
                found[2] or "(root)",
            )


def table(found):
    """Return the ms of each unit in each column, units in the order of the forward."""
    times = defaultdict(lambda: dict.fromkeys(COLUMNS, 0.0))
    for _, duration, column, unit in found:
        times[unit][column] += duration
    return dict(times)


def plot(found, path):
    """Draw the records as bars over time, one row a unit (needs matplotlib)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    units = list(dict.fromkeys(unit for *_, unit in found))
    figure, axes = plt.subplots(figsize=(9, 0.4 * len(units) + 1.2), layout="constrained")
    for column, color in zip(
        COLUMNS, ("tab:blue", "tab:cyan", "tab:orange", "tab:red"), strict=True
    ):
        for row, unit in enumerate(units):
            bars = [(at, wide) for at, wide, kind, of in found if of == unit and kind == column]
            axes.broken_barh(
                bars, (row - 0.4, 0.8), color=color, label=column if row == 0 else None
            )
    axes.set_yticks(range(len(units)), units)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the start of the step, on the CPU of one rank")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def main(argv):
    """Print the table, and draw the picture if a second path is given."""
    found = list(records(argv[0]))
    print(f"{'unit':<12}" + "".join(f"{column:>13}" for column in COLUMNS))
    for unit, times in table(found).items():
        print(f"{unit:<12}" + "".join(f"{time:>10.1f} ms" for time in times.values()))
    if len(argv) > 1:
        plot(found, argv[1])


if __name__ == "__main__":
    main(sys.argv[1:])
