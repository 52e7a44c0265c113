"""What ``watch`` says: which ranks differ, in which call, and where each of them is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from shardkit.errors import message
from shardkit.watching.calls import Difference
from shardkit.watching.team import Seen

RULE = "Every rank must make the same calls in the same order, with the same arguments"
FIX = "Compare the code lines of the ranks below; docs/when-ranks-disagree.md lists usual causes"


def compose(seen: Mapping[int, Seen], difference: Difference | None, store: str = "") -> str:
    """Return the report: one sentence of the form of errors, and a line for each group of ranks. Pure.

    Args:
        seen: by rank, all ranks of the team.
        difference: the first one, if there is any.
        store: what is wrong with the store, if anything.
    """
    idle = max(each.idle for each in seen.values())
    problems = [store] if store else []
    for gone, ranks in _grouped(seen, lambda rank: seen[rank].gone):
        plural = gone.replace("has ", "have ").replace("is ", "are ")
        problems += [f"{_ranks(ranks)} {gone if len(ranks) == 1 else plural}"] if gone else []
    if difference is not None and difference.is_certain:
        problems.append(_disagreement(difference))
    elif difference is not None and not problems:
        late = [rank for rank, call in difference.calls.items() if call is None]
        problems.append(f"{_ranks(late)} did not make call {difference.number + 1} within {idle:.0f} s")
    elif not problems:
        problems.append(f"no rank has made a call for {idle:.0f} s; until then all made the same calls")
    rows = _grouped(seen, lambda rank: _row(seen[rank], difference, rank))
    return "\n".join([message("watch", "; ".join(problems), RULE, FIX), *(f"- {_ranks(r)}: {row}" for row, r in rows)])


def _disagreement(difference: Difference) -> str:
    groups = _grouped(difference.calls, lambda rank: difference.calls[rank] or "")
    groups = [(call, ranks) for call, ranks in groups if call]
    names = {call.partition("(")[0] for call, _ in groups}
    if len(names) == 1 and all("(" in call for call, _ in groups):
        return f"{names.pop()} has different arguments on some ranks: {_arguments(groups)}"
    (call, ranks), other, *_ = sorted(groups, key=lambda group: len(group[1]))
    number = difference.number + 1
    if len(ranks) == len(other[1]):
        return f"ranks differ in call {number}: " + ", ".join(f"{each} on {_ranks(r)}" for each, r in groups)
    return f"{_ranks(ranks)} {'differs' if len(ranks) == 1 else 'differ'} from the others in call {number}: {call}"


def _arguments(groups: Iterable[tuple[str, list[int]]]) -> str:
    values = [(dict(re.findall(r"(\w+)=([^,)]*)", call)), ranks) for call, ranks in groups]
    names = [name for name in values[0][0] if len({given.get(name) for given, _ in values}) > 1]
    return "; ".join(f"{name} is " + ", ".join(f"{v.get(name)} on {_ranks(r)}" for v, r in values) for name in names)


def _row(seen: Seen, difference: Difference | None, rank: int) -> str:
    record = seen.record
    last = record["last"]
    call = difference.calls.get(rank) if difference is not None else None
    parts = [seen.gone, call or f"last {'known ' * bool(seen.gone)}call: {last}"]
    if call and last != call:
        parts.append(f"now at {last}")
    return "; ".join(filter(None, [*parts, record.get("error"), record["line"]]))


def _grouped(ranks: Iterable[int], key: Callable[[int], str]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.items())


def _ranks(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
