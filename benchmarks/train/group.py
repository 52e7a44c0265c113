"""Cases that are measured in one process, and suites of such groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from benchmarks.train.case import Case

Kind: TypeAlias = Literal["each", "apart", "together", "outside", "disk", "ceilings"]


@dataclass(frozen=True)
class Group:
    """What one process measures, in one world.

    Attributes:
        name: unique in its suite.
        cases: the rows. A kind that is not a training step has one, which says model and world.
        kind: ``"each"`` measures the cases one after the other. ``"apart"`` and ``"together"``
            compare them: they take turns in rounds, in an order that rotates. Apart, each is built
            anew in every round and freed after it; together, all stay in memory through all rounds.
            ``"outside"``, ``"disk"`` and ``"ceilings"`` are the measurements of :mod:`outside`,
            :mod:`disk` and :mod:`ceilings`.
        rounds: how often each case is timed.
        steps: timed in a round.
        warm_up: steps before that, after every build. The first makes the optimizer's state and
            compiles.
        allocator: ``PYTORCH_ALLOC_CONF`` of the process; empty leaves what the user has set.
        watch: names of cases whose memory is written down through one step.
    """

    name: str
    cases: tuple[Case, ...]
    kind: Kind = "apart"
    rounds: int = 3
    steps: int = 4
    warm_up: int = 2
    allocator: str = ""
    watch: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: dict[str, Any]) -> Group:
        """From what ``dataclasses.asdict`` made of a group, through JSON or not."""
        cases = tuple(Case(**case) for case in data["cases"])
        return cls(**{**data, "cases": cases, "watch": tuple(data["watch"])})

    @property
    def fake_ranks(self) -> int:
        """The pretended world that all cases share; 0 is the real one."""
        return max(case.fake_ranks for case in self.cases)

    @property
    def compares(self) -> bool:
        """Whether the cases stand against each other, so that all of them must be measured by the
        same process.
        """
        return self.kind in ("apart", "together")


@dataclass(frozen=True)
class Suite:
    """Groups, the most valuable first.

    Attributes:
        name: for ``--suite``.
        groups: in this order.
        device: ``"cuda"`` or ``"cpu"``.
        minutes: all groups together, unless ``--minutes`` says otherwise; None sets no limit.
        fresh: a process for each group, so that none disturbs the next. False saves the imports
            where nothing is timed.
    """

    name: str
    groups: tuple[Group, ...]
    device: str
    minutes: float | None = None
    fresh: bool = True

    def for_ranks(self, count: int) -> Suite:
        """The suite as ``count`` launched ranks run it: what pretends to 8 ranks runs on the real
        ones.

        Larger pretended worlds, and measurements of one process, are left out.
        """
        if count == 1:
            return self
        groups = (on_ranks(group, count) for group in self.groups if group.fake_ranks <= 8)
        return replace(
            self,
            groups=tuple(group for group in groups if group.kind in ("each", "apart", "together")),
        )


def on_ranks(group: Group, count: int) -> Group:
    """The same cases in a real world, under names that say its size."""
    named = {case.name: f"{case.name}-on{count}" for case in group.cases}
    cases = tuple(replace(case, name=named[case.name], fake_ranks=0) for case in group.cases)
    return replace(group, cases=cases, watch=tuple(named[name] for name in group.watch))
