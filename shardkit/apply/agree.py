"""Making sure that all ranks plan the same: an error that only some ranks see is a hang on the others.

Each rank reports its plan and what else must be alike, or its failure. One all-gather of 32 bytes shows whether all
reports are the same; only when they are not, the reports are exchanged, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardkit.errors import PlanError, listing, message
from shardkit.plan import ShardingPlan
from shardkit.ranks import Groups, collective_device, gather_by_rank


def agree_on_plan(
    decide: Callable[[], ShardingPlan], groups: Groups, facts: Callable[[], Mapping[str, str]] = dict
) -> ShardingPlan:
    """What ``decide`` returns, when it returns the same on every rank. Collective over ``groups``.

    Args:
        decide: local; may raise on any rank.
        groups: the process groups of a mesh's axes, which together reach all its ranks; None is the world.
        facts: local, called after ``decide``, may raise too: what else all ranks must have alike, by its name. The
            version of torch is always among them.

    Raises:
        PlanError: ranks disagree, or ``decide`` raised on some but not all; the same message on every rank.
        Exception: what ``decide`` raised, when it raised the same on every rank.
    """
    failure: Exception | None = None
    plan: ShardingPlan | None = None
    try:
        plan = decide()
        alike = {"torch": str(torch.__version__), **facts()}
        report: Any = {"plan": plan.to_dict(), "facts": alike}
        compared = plan.digest() + json.dumps(alike, sort_keys=True).encode()  # notes may differ
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        failure, report = error, f"{type(error).__name__}: {error}"
        compared = report.encode()
    if not _all_equal(compared, groups):
        raise PlanError(_disagreement(gather_by_rank(report, groups))) from failure
    if failure is not None:
        raise failure
    assert plan is not None
    return plan


def _all_equal(report: bytes, groups: Groups) -> bool:
    """Whether all ranks passed the same, by its SHA-256; a difference travels from group to group as zeros."""
    digest = hashlib.sha256(report).digest()
    for group in groups:
        device = collective_device(group)
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
        gathered = [mine.clone() for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        if any(not torch.equal(theirs, mine) for theirs in gathered):
            digest = bytes(len(digest))
    return digest != bytes(len(digest))


def _disagreement(reports: dict[int, Any]) -> str:
    """One message for all ranks: who failed and why, else how each differs from the first."""
    failures = {rank: report for rank, report in reports.items() if isinstance(report, str)}
    if failures:
        lines = [f"- rank {rank}: {report}" for rank, report in failures.items()]
        problem = f"planning failed on {len(failures)} of {len(reports)} ranks"
        return "\n".join([message("plan", problem, "All ranks plan the same model", "Fix these"), *lines])
    names = dict.fromkeys(name for report in reports.values() for name in report["facts"])
    facts = {name: {rank: report["facts"].get(name) for rank, report in reports.items()} for name in names}
    different = [_difference(name, values) for name, values in facts.items() if len(set(values.values())) > 1]
    return "\n".join(different) or _different_plans({rank: report["plan"] for rank, report in reports.items()})


def _difference(name: str, values: dict[int, str | None]) -> str:
    first_rank, first = next(iter(values.items()))
    rank, other = next((rank, value) for rank, value in values.items() if value != first)
    problem = f"{first or 'missing'} on rank {first_rank}, and {other or 'missing'} on rank {rank}"
    rule = "All ranks run one version of torch, and shard one model with the same arguments"
    return message(name, problem, rule, f"Make {name} the same on every rank")


def _different_plans(plans: dict[int, dict[str, Any]]) -> str:
    first_rank, first = next(iter(plans.items()))
    differing = {rank: plan for rank, plan in plans.items() if plan != first}
    problem = f"rank {first_rank} and rank {listing(map(str, differing))} have different plans"
    rank, other = next(iter(differing.items()))
    difference = ShardingPlan.from_dict(first).diff(ShardingPlan.from_dict(other))
    fix = "Build the same model and pass the same arguments on every rank"
    text = message("plan", problem, "All ranks apply one plan to one model", fix)
    return f"{text}\n(- rank {first_rank}, + rank {rank})\n{difference}"
