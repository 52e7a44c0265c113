"""The JSON of one case: what it is made of, where it lies, and how it is read again."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.train.case import Case

Record = dict[str, Any]
FOLDER = "cases"


def summary(seconds: list[list[float]]) -> dict[str, float]:
    """The median second of a step over all rounds, and the medians of the fastest and slowest
    round.
    """
    middles = [statistics.median(each) for each in seconds]
    every = [second for each in seconds for second in each]
    return {
        "median": statistics.median(every),
        "fastest_round": min(middles),
        "slowest_round": max(middles),
    }


def speed(case: Case, seconds: list[list[float]], flops: Any, peak: float | None) -> Record:
    """Tokens a second of one GPU and its MFU under both conventions, which is None where the peak
    is not known.
    """
    from benchmarks.train.flops import mfu

    rate = case.tokens / summary(seconds)["median"]
    both = {name: mfu(getattr(flops, name), rate, peak) for name in ("full", "causal")}
    return {
        "step": summary(seconds),
        "tokens_per_second_per_gpu": rate,
        "mfu": both if peak else None,
    }


def world_of(case: Case, size: int) -> Record:
    """What world a case runs in, and what to call it in tables. ``size``: ranks
    that were launched.
    """
    if case.fake_ranks:
        label = f"1 of {case.fake_ranks} pretended"
        return {"kind": "fake", "size": case.fake_ranks, "label": label, "communication": False}
    if size == 1:
        return {"kind": "one", "size": 1, "label": "1 rank", "communication": False}
    return {"kind": "real", "size": size, "label": f"{size} ranks", "communication": True}


def case_of(record: Record) -> Case:
    """The row of a record, also of one that an older version wrote with fewer fields."""
    known = {each.name for each in fields(Case)}
    return Case(**{name: value for name, value in record["case"].items() if name in known})


def path_of(folder: Path, name: str) -> Path:
    """Where the record of a case lies."""
    return folder / FOLDER / f"{name}.json"


def write(folder: Path, record: Record) -> None:
    """Whole or not at all."""
    path = path_of(folder, record["name"])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


def read(folder: Path) -> dict[str, Record]:
    """All records by name, oldest first; empty where nothing is.

    They lie in a file each, or together in what ``benchmarks.gpu`` wrote.
    """
    records = [json.loads(path.read_text()) for path in sorted((folder / FOLDER).glob("*.json"))]
    together = folder / "results.json"
    if together.exists():
        records += json.loads(together.read_text())["records"].values()
    return {
        record["name"]: record for record in sorted(records, key=lambda record: record["finished"])
    }


def failed(case: Case, group: str, error: str, *, now: float, size: int) -> Record:
    """The record of a case whose process ended."""
    common = {
        "name": case.name,
        "group": group,
        "case": asdict(case),
        "world": world_of(case, size),
    }
    return {**common, "error": error, "finished": now}


def measured(record: Record) -> bool:
    """Whether a record holds figures."""
    return not record.get("error") and not record.get("unavailable")
