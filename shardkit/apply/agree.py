"""Making sure that all ranks decide the same: an error that only some ranks see is a hang on the others.

Each rank reports its plan and other facts, or its failure. One all-gather of 32 bytes shows whether all reports are
equal; only when they are not, the reports are exchanged, and every rank raises the same error.
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
    """Return what ``decide`` returns, if it returns the same on every rank. Collective over ``groups``.

    Args:
        decide: local; may raise on any rank.
        groups: the process groups of a mesh's axes, which together reach all its ranks; None is the world.
        facts: local, called after ``decide``, may raise too: what else must be equal on all ranks, by name. The
            version of torch is always included.

    Raises:
        PlanError: ranks disagree, or ``decide`` raised on some ranks only; the same message on every rank.
        Exception: what ``decide`` raised, when it raised the same on every rank.
    """
    failure: Exception | None = None
    plan: ShardingPlan | None = None
    try:
        plan = decide()
        alike = {"torch": str(torch.__version__), **facts()}
        report: Any = {"plan": plan.to_dict(), "facts": alike}
        compared = plan.digest() + json.dumps(alike, sort_keys=True).encode()  # notes may differ
    except Exception as error:  # any exception, because the other ranks must not wait for this one
        failure, report = error, f"{type(error).__name__}: {error}"
        compared = report.encode()
    if not all_equal(compared, groups):
        raise PlanError(_disagreement(gather_by_rank(report, groups))) from failure
    if failure is not None:
        raise failure
    assert plan is not None
    return plan


def all_equal(data: bytes, groups: Groups) -> bool:
    """Whether all ranks pass the same, compared by SHA-256. Collective: one all-gather of 32 bytes for each group."""
    digest = hashlib.sha256(data).digest()
    for group in groups:
        device = collective_device(group)
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
        gathered = [mine.clone() for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        if any(not torch.equal(theirs, mine) for theirs in gathered):
            digest = bytes(len(digest))  # zeros, which the next group sees as a difference
    return digest != bytes(len(digest))


def _disagreement(reports: dict[int, Any]) -> str:
    """One message for all ranks: which ranks failed and why, or how each differs from the first."""
    failures = {rank: report for rank, report in reports.items() if isinstance(report, str)}
    if failures:
        lines = [f"- rank {rank}: {report}" for rank, report in failures.items()]
        problem = f"planning failed on {len(failures)} of {len(reports)} ranks"
        return "\n".join([message("plan", problem, "All ranks plan the same model", "Fix these errors"), *lines])
    first_rank, first = next(iter(reports.items()))
    lines = []
    for name in dict.fromkeys(name for report in reports.values() for name in report["facts"]):
        mine = first["facts"].get(name)
        others = {rank: report["facts"].get(name) for rank, report in reports.items()}
        rank, other = next(((rank, value) for rank, value in others.items() if value != mine), (first_rank, mine))
        if rank != first_rank:
            problem = f"{mine or 'missing'} on rank {first_rank}, and {other or 'missing'} on rank {rank}"
            rule = "All ranks run one version of torch, and shard one model with the same arguments"
            lines.append(message(name, problem, rule, f"Make {name} the same on every rank"))
    if lines:
        return "\n".join(lines)
    differing = {rank: report["plan"] for rank, report in reports.items() if report["plan"] != first["plan"]}
    problem = f"rank {first_rank} and rank {listing(map(str, differing))} have different plans"
    fix = "Build the same model and pass the same arguments on every rank"
    text = message("plan", problem, "All ranks apply one plan to one model", fix)
    rank, other = next(iter(differing.items()))
    difference = ShardingPlan.from_dict(first["plan"]).diff(ShardingPlan.from_dict(other))
    return f"{text}\n(- rank {first_rank}, + rank {rank})\n{difference}"
