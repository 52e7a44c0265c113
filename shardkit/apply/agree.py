"""Making sure that all ranks decide the same: an error that only some ranks see is a hang on the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardkit.errors import PlanError
from shardkit.plan import ShardingPlan
from shardkit.ranks import Groups, together


def agree_on_plan(
    decide: Callable[[], ShardingPlan], groups: Groups, facts: Callable[[], Mapping[str, str]] = dict
) -> ShardingPlan:
    """Return what ``decide`` returns, if it returns the same on every rank. Collective: one small all-reduce per group.

    Args:
        decide: local; may raise on any rank.
        groups: the process groups of a mesh's axes, which together reach all its ranks; None is the world.
        facts: local, called after ``decide``, may raise too: what else must be equal on all ranks, by name. The
            version of torch is always included.

    Raises:
        PlanError: ranks disagree, or ``decide`` raised on some ranks only; on every rank.
        Exception: what ``decide`` raised on this rank.
    """
    with together(groups, PlanError) as poll:
        plan = decide()
        poll.same = {"torch": str(torch.__version__), **facts(), "plan": _by_part(plan)}
    return plan


def _by_part(plan: ShardingPlan) -> dict[str, Any]:
    """Return the JSON form with a key for each unit and parameter, so that an error shows those that differ."""
    data = plan.to_dict()
    del data["notes"]  # notes may differ
    units = {f"unit {each.name}": value for each, value in zip(plan.units, data.pop("units"), strict=True)}
    params = {f"parameter {each.fqn}": value for each, value in zip(plan.params, data.pop("params"), strict=True)}
    return {**params, **units, **data}
