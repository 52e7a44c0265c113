"""The numbers that a step in several parts changes besides parameters and their state, such as a count of steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardkit.errors import ShardkitError, message

Changes = dict[tuple[Any, Any], Any]  # by place, a group's number or one of the two others, and name
ATTRIBUTES, STATE = "an attribute", "optimizer.state"


class Numbers:
    """An optimizer's numbers before a step, with which each part of it begins, and what the parts make of them.

    They are in its groups, in its attributes, and in its state under a name instead of a parameter. A part steps those
    matrices of a bucket that a rank owns. A number must change once, and in the same way on every rank, so parts that
    change it to different values raise.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._before = optimizer, _numbers(optimizer)
        self._changed: Changes = {}

    def take(self) -> Changes:
        """Return what a part has changed, and set the numbers to those before the step. In place."""
        found, places = _numbers(self._optimizer), _places(self._optimizer)
        changed = {at: value for at, value in found.items() if not _same(self._before.get(at, None), value)}
        for place, key in found.keys() - self._before.keys():
            del places[place][key]
        _write(places, self._before)
        return changed

    def add(self, changes: Changes) -> None:
        """Add what a part changed, on this rank or another."""
        for (place, key), value in changes.items():
            if not _same(known := self._changed.setdefault((place, key), value), value):
                where = f"group {place}" if isinstance(place, int) else place
                problem = f"changed {key!r} in {where} to {known} for some parameters, to {value} for others"
                rule = "Each rank steps some of the parameters, and such a number must not depend on which"
                fix = (
                    "Step it on DTensors as it is, which prodigyopt's Prodigy can, or keep it in optimizer.state[param]"
                )
                raise ShardkitError(message("optimizer", problem, rule, fix))

    def write(self) -> None:
        """Give the optimizer the numbers that the whole step leaves. In place."""
        _write(_places(self._optimizer), self._changed)


def _places(optimizer: Any) -> dict[Any, dict[Any, Any]]:
    return {ATTRIBUTES: vars(optimizer), STATE: optimizer.state, **dict(enumerate(optimizer.param_groups))}


def _numbers(optimizer: Any) -> Changes:
    found: Changes = {}
    for place, held in _places(optimizer).items():
        for key, value in held.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                found[place, key] = value.detach().cpu().clone()
            elif isinstance(value, (int, float)):
                found[place, key] = value
    return found


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or bool(a != a and b != b)  # NaN


@torch.no_grad()
def _write(places: dict[Any, dict[Any, Any]], numbers: Changes) -> None:
    for (place, key), value in numbers.items():
        if isinstance(old := places[place].get(key), Tensor):
            old.copy_(value)
        else:
            places[place][key] = value
