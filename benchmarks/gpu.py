"""One GPU in minutes: the tests on it, then training steps, the most valuable first.

``python -m benchmarks.gpu --minutes 6 --out DIR`` runs from a plain copy of the tree with nothing
installed. It prints a line of facts, runs ``tests/gpu``, then the groups of
:func:`benchmarks.train.suites.one_card`, each in a process of its own. What no longer fits the
minutes is left out by name. DIR has at most 8 files, written anew after every case: ``results.json``,
``README.md`` with all tables, ``log.txt``, ``tests.txt``, and pictures.

``--only GROUP`` runs one group (``tests`` is one too; ``memory``, the table of predicted and
allocated memory of 20 models, runs last, or alone), ``--estimate`` prints the plan, and ``--cpu``
runs everything small on a CPU, to show that it works. ``python -m benchmarks.train --table DIR``
prints the README's tables of DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.train import records
from benchmarks.train.estimate import seconds
from benchmarks.train.group import Suite
from benchmarks.train.run import Runner
from benchmarks.train.suites import on_cpu, one_card, without_compiler

ROOT = Path(__file__).parents[1]
TESTS_SECONDS = 100.0  # on a GPU
MEMORY_SECONDS = 60.0
MEMORY = (sys.executable, "-m", "benchmarks.memory", "--table")
TESTS = (sys.executable, "-m", "pytest", "tests/gpu", "--confcutdir=tests/gpu", "-q", "-rfEs")
# Published runs of the same configuration, by the case that repeats them: source, tokens/s, MFU.
PUBLISHED = {
    "8b-kempner": ("KempnerForge, 1 H200", 10_471, 0.545),
    "7b-thunder": ("FSDP2 with thunder, 8 H100 (pull 940)", 12_493, 0.582),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the kit. Returns 0, or 1 if a test or a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="directory of results, at most 8 files")
    parser.add_argument(
        "--minutes", type=float, default=6.0, help="start nothing that does not fit"
    )
    parser.add_argument("--only", metavar="GROUP", help="run one group, or 'tests'")
    parser.add_argument("--estimate", action="store_true", help="print the plan and its seconds")
    parser.add_argument("--cpu", action="store_true", help="everything small, on a CPU")
    options = parser.parse_args(arguments)
    facts = facts_of_machine(options.cpu)
    suite = suite_for(facts, options.cpu)
    names = ["tests", "memory", *(group.name for group in suite.groups)]
    if options.only is not None and options.only not in names:
        parser.error(f"--only {options.only}: not a group. Pass one of {', '.join(names)}.")
    if options.estimate:
        print(plan_of(suite))
        return 0
    if options.out is None:
        parser.error("give --out DIR, or --estimate")
    if facts["gpu"] is None and not options.cpu:
        print("torch sees no GPU here. Pass --cpu to run everything small.", file=sys.stderr)
        return 2
    kit = Kit(options.out, facts, time.monotonic() + 60 * options.minutes)
    kit.log(" ".join(f"{name}={value}" for name, value in facts.items()))
    if options.only in (None, "tests"):
        kit.run_tests(options.cpu)
    groups = tuple(group for group in suite.groups if options.only in (None, group.name))
    if groups:
        kit.run_groups(replace(suite, groups=groups))
    if options.only in (None, "memory"):
        kit.run_memory(options.cpu)
    print((options.out / "README.md").read_text())
    return int(kit.has_failed)


def facts_of_machine(cpu: bool) -> dict[str, Any]:
    """What decides which cases run: versions, the card, and whether torch.compile has a compiler."""
    import torch

    has_gpu = torch.cuda.is_available() and not cpu
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    return {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "gpu": torch.cuda.get_device_name(0).replace(" ", "_") if has_gpu else None,
        "gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30) if has_gpu else None,
        "cc": compiler is not None,
        "Python.h": header.exists(),
    }


def suite_for(facts: dict[str, Any], cpu: bool) -> Suite:
    """Return the groups for this card, or all of them small for a CPU."""
    suite = one_card(facts["gib"] or 80)
    if cpu:
        return on_cpu(suite)
    if not (facts["cc"] and facts["Python.h"]):
        return without_compiler(suite)  # each compiled case would fail after 20 s
    return suite


def plan_of(suite: Suite) -> str:
    """Return a line for each group: its seconds on an H200, and when it is done."""
    lines, total = [f"{'tests':16} {TESTS_SECONDS:6.0f} s"], TESTS_SECONDS
    for group in suite.groups:
        total += seconds(group)
        lines.append(f"{group.name:16} {seconds(group):6.0f} s, done after {total:4.0f} s")
    return "\n".join(lines)


class Kit:
    """One run into a directory that always has all results so far.

    Args:
        out: the directory.
        facts: of the machine.
        deadline: by ``time.monotonic``, after which nothing starts.
    """

    def __init__(self, out: Path, facts: dict[str, Any], deadline: float) -> None:
        self.out, self.facts, self.deadline = out, facts, deadline
        self.started, self.has_failed, self.tests = time.monotonic(), False, "not run"
        self.known: dict[str, records.Record] = {}
        self.page = self.memory = ""
        out.mkdir(parents=True, exist_ok=True)
        (out / "log.txt").write_text("")

    def log(self, text: str) -> None:
        """Print a line, with the seconds since the start, also to ``log.txt``."""
        line = f"{time.monotonic() - self.started:5.0f} s  {text}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a") as file:
            file.write(line + "\n")

    def run_tests(self, cpu: bool) -> None:
        """Run ``tests/gpu``; what they print is in ``tests.txt`` at once."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        limit = self.deadline - time.monotonic()
        if cpu:
            environment["SHARDKIT_GPU_TESTS"] = "cpu"
        else:
            limit = min(limit, 2 * TESTS_SECONDS)
        with (self.out / "tests.txt").open("w") as file:
            try:
                done = subprocess.run(
                    TESTS, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=limit
                )
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = -1
        # The last is pytest's summary, unless a library writes when the process ends.
        text = (self.out / "tests.txt").read_text()
        lines = [
            line for line in text.splitlines() if re.search(r"\d (passed|failed|error|skip)", line)
        ]
        self.tests = (
            f"no end after {limit:.0f} s" if code == -1 else (lines or [text])[-1].strip("= ")
        )
        self.has_failed = code != 0
        self.log(f"tests/gpu: {self.tests}")
        self.write({}, "")

    def run_memory(self, cpu: bool) -> None:
        """Predicted memory beside that of the allocator, if a minute is left."""
        limit = self.deadline - time.monotonic()
        if limit < MEMORY_SECONDS:
            self.log("memory: left out, no time")
            return
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        try:
            done = subprocess.run(
                MEMORY, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            self.log(f"memory: no end after {limit:.0f} s")
            return
        self.has_failed |= done.returncode != 0
        # the rows so far, where a model has failed
        self.memory = done.stdout or done.stderr[-3000:]
        self.log("memory: " + ("failed" if done.returncode else "measured"))
        self.write(self.known, self.page)

    def run_groups(self, suite: Suite) -> None:
        """Measure the groups until the deadline, and write the results after every case."""
        with tempfile.TemporaryDirectory() as folder:
            minutes = (self.deadline - time.monotonic()) / 60
            runner = _Runner(suite, Path(folder), minutes=max(minutes, 0.01))
            runner.kit = self
            runner.run()

    def write(self, known: dict[str, records.Record], page: str) -> None:
        """Write ``results.json`` and ``README.md``."""
        self.known, self.page = known, page
        results = {"facts": self.facts, "tests": self.tests, "records": known}
        _replace(self.out / "results.json", json.dumps(results, indent=1) + "\n")
        parts = ["# One GPU", f"`tests/gpu`: {self.tests}.", published(known), page, self.memory]
        _replace(self.out / "README.md", "\n\n".join(filter(None, parts)) + "\n")


class _Runner(Runner):
    """Copies each new state of its own folder to the kit's directory."""

    kit: Kit
    seen: frozenset[str] = frozenset()

    def _report(self, *, plots: bool) -> None:
        super()._report(plots=plots)
        known = records.read(self.folder)
        for name in sorted(known.keys() - self.seen):
            self.kit.log(outcome(known[name]))
            self.kit.has_failed |= bool(known[name].get("error"))
        for name in self.skipped:
            if name not in self.seen:
                self.kit.log(f"{name}: left out, no time")
        self.seen = frozenset(known) | frozenset(self.skipped)
        for picture in self.folder.glob("*.png"):
            shutil.copyfile(picture, self.kit.out / picture.name)
        self.kit.write(known, (self.folder / "README.md").read_text())


def outcome(record: records.Record) -> str:
    """One line for the log."""
    if record.get("error"):
        return f"{record['name']}: failed, {record['error'][:200]}"
    if record.get("unavailable"):
        return f"{record['name']}: left out, {record['unavailable']}"
    if not record.get("step"):
        return f"{record['name']}: measured"
    mfu = f", MFU {record['mfu']['full']:.1%}" if record.get("mfu") else ""
    speed = record["tokens_per_second_per_gpu"]
    return f"{record['name']}: {record['step']['median'] * 1e3:.1f} ms, {speed:,.0f} tokens/s{mfu}"


def published(known: dict[str, records.Record]) -> str:
    """Return the table of published runs beside ours of the same configuration; empty without one."""
    rows = []
    for name, (source, rate, mfu) in PUBLISHED.items():
        record = known.get(name)
        if record is None or not record.get("mfu"):
            continue
        ours = f"{record['tokens_per_second_per_gpu']:,.0f} | {record['mfu']['full']:.1%}"
        rows.append(f"| `{name}` | {ours} | {source} | {rate:,} | {mfu:.1%} |")
    if not rows:
        return ""
    titles = "| case | tokens/s | MFU | published by | tokens/s | MFU |\n|" + " --- |" * 6
    return titles + "\n" + "\n".join(rows)


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


if __name__ == "__main__":
    raise SystemExit(main())
