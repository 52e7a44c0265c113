"""The page of a folder of results, in Markdown. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.train import figures, ratios
from benchmarks.train.case import Case
from benchmarks.train.group import Group, Suite
from benchmarks.train.records import Record, case_of, measured, read
from benchmarks.train.suites import SUITES

Records = Mapping[str, Record]
GIB = 2**30
MOST_LEFT = 2**29  # bytes after a case was freed; workspaces of cuBLAS stay, some ten MiB
TITLES = ("case", "side", "world", "tokens", "settings", "ms a step", "tokens/s a rank")
MORE_TITLES = ("MFU", "MFU, causal", "allocated", "reserved")
LEGEND = """How to read the tables:

- **world**: `1 of N pretended` is torch's `fake` process group. One process takes itself for rank 0 of N, with that
  rank's shards, kernels and memory, and nothing is communicated. Its tokens/s and MFU are a ceiling without
  communication (`<=`), no speed of N GPUs, and values are not those of a training. `1 rank` has nobody to communicate
  with: FSDP2 then copies where it would gather. `not sharded` is a plain model in one process. Only `N ranks` is a
  speed of N GPUs.
- **ms a step**: forward, backward, clipping and AdamW; the median of all timed steps after warm-up, and the medians of
  the fastest and slowest round. CUDA events on a GPU. Every step has new random tokens, the same on all sides.
- **MFU**: 6 N + 12 L W S operations a token over the GPU's dense bf16 peak, as public figures are counted; **causal**:
  with half of the attention, which is what a causal mask leaves. Nothing recomputed is counted
  (`benchmarks/train/flops.py`). `-` where the peak is not known, for a CPU, and in float32.
- **allocated**, **reserved**: `torch.cuda.max_memory_allocated` and `_reserved` in GiB over a round of steps after
  warm-up and a reset, with nothing else in the process."""
CPU_NOTE = """**These are CPU times of a tiny model, to show that everything runs. They say nothing about a GPU, nor
which side is faster.**"""


def write(folder: Path, suite: Suite, *, skipped: Iterable[str] = (), plots: bool = True) -> None:
    """Write ``README.md``, and the pictures it shows if ``plots``."""
    known = read(folder)
    there = sorted(path.name for path in folder.glob("*.png"))
    drawn, said = _draw(folder, known) if plots else (there, "")
    text = page(known, suite, skipped=skipped)
    pictures = "\n\n".join(f"![{name.removesuffix('.png')}]({name})" for name in drawn)
    part = folder / "README.md.part"
    part.write_text("\n\n".join(filter(None, [text, pictures, said])) + "\n")
    os.replace(part, folder / "README.md")


def _draw(folder: Path, known: Records) -> tuple[list[str], str]:
    try:
        from benchmarks.train import plots
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "matplotlib":
            raise
        return [], "No plots: matplotlib is not installed (`pip install matplotlib`)."
    return plots.draw(folder, known), ""


def page(known: Records, suite: Suite, *, skipped: Iterable[str] = ()) -> str:
    """The whole page."""
    parts = [f"# Training steps: suite `{suite.name}`", _machines(known.values()), _how(suite)]
    if suite.device == "cpu":
        parts.append(CPU_NOTE)
    parts += ["## Figures to reach", figures.table(known)]
    groups = groups_of(known, suite)
    for group in groups:
        parts += _group(group, known)
    parts += ["## Reading", LEGEND, _left(known, groups, list(skipped))]
    return "\n\n".join(filter(None, parts))


def short(folder: Path) -> str:
    """What the project's README shows: the figures to reach, and all training steps if a GPU ran
    any.
    """
    known = read(folder)
    shown = [
        group for group in SUITES["h200"]().groups if group.kind in ("each", "apart", "together")
    ]
    names = [case.name for group in shown for case in group.cases if case.name in known]
    rows = [known[name] for name in names if figures.on_gpu(known[name])]
    parts = [_machines(known.values()) if rows else "", figures.table(known)]
    return "\n\n".join(
        filter(None, [*parts, rows_table(rows) if rows else "", _label_note() if rows else ""])
    )


def _label_note() -> str:
    return LEGEND.split("\n\n")[1].split("\n- **ms")[0]


def groups_of(known: Records, suite: Suite) -> list[Group]:
    """The suite's groups, and those that ran on several ranks into the same folder."""
    sizes = sorted(
        {record["world"]["size"] for record in known.values() if record["world"]["kind"] == "real"}
    )
    original = SUITES[suite.name]()
    suites = [original] + [original.for_ranks(size) for size in sizes]
    groups: dict[tuple[str, ...], Group] = {}
    for each in [suite, *suites]:
        for group in each.groups:
            groups.setdefault(tuple(case.name for case in group.cases), group)
    return [group for group in groups.values() if any(case.name in known for case in group.cases)]


def _group(group: Group, known: Records) -> list[str]:
    records = [known[case.name] for case in group.cases if case.name in known]
    if group.kind in ("outside", "disk", "ceilings"):
        return [f"## {group.name}", *map(_values, records)]
    rows = [record for record in records if measured(record)]
    world = ", ".join(sorted({_world(record) for record in rows}))
    parts = [f"## {group.name}" + (f": {world}" if world else "")]
    parts += [rows_table(rows)] if rows else []
    parts += [_ratios(group, known)] if group.compares else []
    return [*parts, *_missing(records)]


def _values(record: Record) -> str:
    if not measured(record):
        return _missing([record])[0]
    values, world = record["values"], f"World: {record['world']['label']}."
    if isinstance(values, dict):
        lines = [
            f"| {name} | {'-' if value is None else f'{value:.4g}'} |"
            for name, value in values.items()
        ]
        return "\n".join(["| what | value |", "| --- | --- |", *lines]) + f"\n\n{world}"
    ours, theirs = zip(*values, strict=True)
    middle = len(values) // 2
    each = [
        f"{sorted(side)[middle]:.4g} s {hand}"
        for side, hand in ((ours, "with shardkit"), (theirs, "by hand"))
    ]
    ratio = f"ratio {ratios.pairs(values)}, {len(values)} alternating rounds"
    return f"CPU seconds of a step outside the model: {', '.join(each)}; {ratio}. {world}"


def rows_table(records: Iterable[Record]) -> str:
    """A row for each record that holds figures."""
    titles = (*TITLES, *MORE_TITLES)
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * 5}{' ---: |' * (len(titles) - 5)}"]
    return "\n".join(lines + [f"| {' | '.join(_cells(record))} |" for record in records])


def _cells(record: Record) -> list[str]:
    case, step, both = case_of(record), record["step"], record.get("mfu") or {}
    most = "<= " if record["world"]["kind"] == "fake" and case.side != "bare" else ""
    spread = f"({step['fastest_round'] * 1e3:.1f} to {step['slowest_round'] * 1e3:.1f})"
    return [
        *(
            case.name,
            case.side,
            _world(record),
            f"{case.micro_batch} x {case.sequence:,}",
            _settings(record),
        ),
        *(
            f"{step['median'] * 1e3:.1f} {spread}",
            f"{most}{record['tokens_per_second_per_gpu']:,.0f}",
        ),
        *(f"{most}{both[name]:.1%}" if both.get(name) else "-" for name in ("full", "causal")),
        *(
            f"{record[name] / GIB:.2f}" if record.get(name) else "-"
            for name in ("allocated", "reserved")
        ),
    ]


def _world(record: Record) -> str:
    return "not sharded" if record["case"]["side"] == "bare" else str(record["world"]["label"])


def _settings(record: Record) -> str:
    return ", ".join(filter(None, [settings(case_of(record)), record.get("allocator")]))


def settings(case: Case) -> str:
    """What a case changes of the defaults, in a few words."""
    words = {
        "float32": not case.bf16,
        "no float32 masters": not case.masters,
        "transformers' Llama": case.model.startswith("hf-"),
        f"reshard {case.reshard}": case.reshard is not None,
        str(case.strategy): case.strategy is not None,
        f"{case.replicas} replicas": case.replicas > 1,
        f"recomputes: {case.checkpointing}": case.checkpointing != "none",
        "compiled": case.compile,
        "CPU offload": case.offload,
        f"AdamW: {case.stepping.replace('_', ' ')}": case.stepping != "fused",
        f"budget {case.budget_gib} GiB": case.budget_gib is not None,
    }
    return ", ".join(word for word, applies in words.items() if applies)


def _ratios(group: Group, known: Records) -> str:
    ours = known.get(group.cases[0].name)
    others = [
        known[case.name]
        for case in group.cases[1:]
        if case.name in known and measured(known[case.name])
    ]
    if ours is None or not measured(ours) or not others:
        return ""
    lines = [
        f"| {ours['name']} / | throughput | allocated | reserved | losses |",
        "| --- | --- | --- | --- | --- |",
    ]
    for other in others:
        values = [
            ratios.throughput(ours, other),
            *(ratios.memory(ours, other, it) for it in ("allocated", "reserved")),
        ]
        cells = [
            other["name"],
            *(str(value or "-") for value in values),
            _agreement(other.get("agreement")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _agreement(agreement: Record | None) -> str:
    if agreement is None:
        return "-"
    seen = f"first {agreement['first']:.1e}, later {agreement['later']:.1e}"
    if agreement["holds"] is None:
        return "another model in a pretended world"
    first, later = agreement["allowed"]
    return (
        f"{'agree' if agreement['holds'] else '**differ**'}: {seen} (allowed {first:.1e}, "
        f"{later:.1e})"
    )


def _missing(records: Iterable[Record]) -> list[str]:
    lines = [f"- `{each['name']}` failed: {each['error']}" for each in records if each.get("error")]
    lines += [
        f"- `{each['name']}` left {each['stayed'] / GIB:.2f} GiB allocated behind it"
        for each in records
        if (each.get("stayed") or 0) > MOST_LEFT
    ]
    lines += [
        f"- `{each['name']}` left out: {each['unavailable']}"
        for each in records
        if each.get("unavailable")
    ]
    return ["\n".join(lines)] if lines else []


def _left(known: Records, groups: list[Group], skipped: list[str]) -> str:
    lines = [f"- `{name}`: no time was left" for name in skipped]
    for group in groups:
        missing = [f"`{case.name}`" for case in group.cases if case.name not in known]
        lines += (
            [f"- {', '.join(missing)}: not yet measured"]
            if missing and group.name not in skipped
            else []
        )
    return "\n".join(["## Not measured", "", *lines]) if lines else ""


def _machines(records: Iterable[Record]) -> str:
    """Where and with what; several lines if the folder holds several."""
    lines = {_machine(record): None for record in records if "machine" in record}
    return "\n".join(f"- {line}" for line in lines) if len(lines) > 1 else "".join(lines)


def _machine(record: Record) -> str:
    facts = record["machine"]
    gpu = (
        f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}" if facts["gpu"] else "CPU"
    )
    packages = "".join(f", {name} {version}" for name, version in facts["packages"].items())
    asked = record.get("allocator")  # stands in the row
    set_by_user = "".join(
        f", {name}={value}" for name, value in facts["settings"].items() if value != asked
    )
    commit = (facts["commit"] or "unknown")[:12] + (
        "+" if (facts["commit"] or "").endswith("+") else ""
    )
    versions = f"torch {facts['torch']}, Python {facts['python']}{packages}"
    return f"{gpu}; {versions}; {facts['cpus']} CPU cores; commit {commit}{set_by_user}."


def _how(suite: Suite) -> str:
    return (
        f"Repeat with `python -m benchmarks.train --suite {suite.name} --out DIR`; with `torchrun` "
        "on several GPUs."
    )
