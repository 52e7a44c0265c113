"""The findings of an audit, as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shardkit.errors import listing
from shardkit.fsdp1.audit.judge import SUPPORT, Support
from shardkit.replacements import Topic

MOST_PLACES = 4

TOPICS: dict[Topic, str] = {  # in the order in which to change them
    "optimizer": "Build optimizers after sharding: an optimizer built before updates tensors that the model no "
    "longer uses, without an error",
    "internals": "Replace FSDP1's internals: they have no direct replacement",
    "state": "Change saving and loading: torch's FSDP1 functions do nothing to an FSDP2 model, without an error",
    "wrapping": "Shard the model instead of wrapping it",
    "loop": "Change the training loop: clipping, accumulation, scaling",
    "config": "Change settings and policies, or keep them for shard_like_fsdp1",
    "names": "Change imports, checks and annotations last: Python reports what is left",
}
UNSEEN = (
    "Not found: names built at run time, and models that are wrapped in one file and used in another, unless only\n"
    "FSDP1 has the method (likely)."
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One use of FSDP1.

    Attributes:
        path: of the file, as given.
        line: from 1; of the cell, in a notebook.
        column: from 1, in characters.
        name: in torch, ``FullyShardedDataParallel.no_sync`` for a method.
        code: as written, on one line, shortened.
        support: exact, note, decision or impossible.
        replacement: one line of shardkit or FSDP2 code; empty if the code is removed or you must decide.
        why: what to know about it.
        topic: its group in the order of what to change first.
        likely: only the name suggests FSDP1, or the model is wrapped only on some paths through the program.
        cell: of a notebook, from 1.
    """

    path: str
    line: int
    column: int
    name: str
    code: str
    support: Support
    replacement: str
    why: str
    topic: Topic
    likely: bool = False
    cell: int | None = None

    @property
    def place(self) -> str:
        """``path:line:column``, which terminals make a link."""
        cell = "" if self.cell is None else f"#cell{self.cell}"
        return f"{self.path}{cell}:{self.line}:{self.column}"


@dataclasses.dataclass(frozen=True)
class Unread:
    """A file, or a cell of a notebook, that may use FSDP1 and could not be read, with the reason."""

    path: str
    reason: str


@dataclasses.dataclass(frozen=True)
class FileAudit:
    """The findings in one file.

    Attributes:
        path: as given, or below the directory that was given.
        findings: in order of place.
        unread: the file itself, or cells of a notebook.
        mixes: whether it uses both FSDP1 and FSDP2.
    """

    path: str
    findings: tuple[Finding, ...] = ()
    unread: tuple[Unread, ...] = ()
    mixes: bool = False


class Step(NamedTuple):
    """One item of what to change first."""

    topic: Topic
    sentence: str
    findings: tuple[Finding, ...]


@dataclasses.dataclass(frozen=True)
class Audit:
    """Every use of FSDP1 in some files; ``print(audit)`` shows it.

    Attributes:
        files: those that use FSDP1 or could not be read, in order.
        read: the number of files read.
    """

    files: tuple[FileAudit, ...]
    read: int

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All uses, in order of file and place."""
        return tuple(finding for file in self.files for finding in file.findings)

    @property
    def unread(self) -> tuple[Unread, ...]:
        """What could not be read, with reasons."""
        return tuple(unread for file in self.files for unread in file.unread)

    @property
    def counts(self) -> dict[Support, int]:
        """Uses for each support, from good to bad."""
        return {support: sum(finding.support == support for finding in self.findings) for support in SUPPORT}

    @property
    def is_settled(self) -> bool:
        """Whether all files were read, and every use has a replacement."""
        return not self.unread and not self.counts["decision"] and not self.counts["impossible"]

    @property
    def steps(self) -> tuple[Step, ...]:
        """What to change, in order; within a step the worst first."""
        worst_first = sorted(self.findings, key=lambda finding: -list(SUPPORT).index(finding.support))
        steps = [Step(topic, said, tuple(f for f in worst_first if f.topic == topic)) for topic, said in TOPICS.items()]
        return tuple(step for step in steps if step.findings)

    def __str__(self) -> str:
        """Grouped by file, then the counts, what to change first, and what was not read."""
        groups = ["\n".join(_lines(file.findings)) for file in self.files if file.findings]
        return "\n\n".join([*groups, *_summary(self), UNSEEN])


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    levels = [SUPPORT[finding.support] + (", likely" if finding.likely else "") for finding in findings]
    place, support = max(len(finding.place) for finding in findings), max(map(len, levels))
    for finding, said in zip(findings, levels, strict=True):
        yield f"{finding.place:{place}}  {said:{support}}  {finding.code}"
        if finding.replacement:
            yield f"    -> {finding.replacement}"
        if finding.why:
            yield f"       {finding.why}"


def _summary(audit: Audit) -> Iterator[str]:
    used, total = sum(bool(file.findings) for file in audit.files), len(audit.findings)
    counts = ", ".join(f"{count} {SUPPORT[support]}" for support, count in audit.counts.items())
    yield f"{total} use{'s' * (total != 1)} of FSDP1 in {used} of {audit.read} files: {counts}"
    lines = ["Change first:"]
    for number, step in enumerate(audit.steps, start=1):
        places = listing((finding.place for finding in step.findings), MOST_PLACES)
        lines += [f"{number}. {step.sentence}.", f"   {len(step.findings)}: {places}"]
    if audit.steps:
        yield "\n".join(lines)
    if audit.unread:
        reasons = [f"  {unread.path}: {unread.reason}" for unread in audit.unread]
        yield "\n".join(["Could not be read:", *reasons])
    mixed = [file.path for file in audit.files if file.mixes]
    if mixed:
        yield f"FSDP1 and FSDP2 in one file: {listing(mixed)}"


def as_json(audit: Audit) -> str:
    """The same as one JSON object; keys are those of ``Finding`` and ``Unread``."""
    data: dict[str, Any] = {
        "read": audit.read,
        "counts": audit.counts,
        "findings": [dataclasses.asdict(finding) for finding in audit.findings],
        "unread": [dataclasses.asdict(unread) for unread in audit.unread],
        "mixed": [file.path for file in audit.files if file.mixes],
        "change_first": [
            {"topic": step.topic, "sentence": step.sentence, "places": [finding.place for finding in step.findings]}
            for step in audit.steps
        ],
    }
    return json.dumps(data, indent=2)
