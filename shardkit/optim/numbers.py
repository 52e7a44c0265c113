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
    disagree raise. Of a group, those parts count that step a parameter of it, if there are any.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._before = optimizer, _numbers(optimizer)
        self._changed: Changes = {}
        self._idle: Changes = {}  # of groups, in parts that stepped none of their parameters

    def begin(self) -> None:
        """Set the numbers to those before the step. In place."""
        places = _places(self._optimizer)
        for place, key in _numbers(self._optimizer).keys() - self._before.keys():
            del places[place][key]
        _write(places, self._before)

    def end(self, stepped: set[int]) -> Changes:
        """Return what a part changed that stepped parameters of these groups."""
        found: Changes = {}
        for (place, key), value in _numbers(self._optimizer).items():
            old = self._before.get((place, key))
            if old is None or not _same(old, value):
                is_idle = isinstance(place, int) and place not in stepped
                (self._idle if is_idle else found)[place, key] = value
        return found

    def add(self, changes: Changes) -> None:
        """Add what a part changed, on this rank or another."""
        for (place, key), value in changes.items():
            if not _same(known := self._changed.setdefault((place, key), value), value):
                where = f"group {place}" if isinstance(place, int) else place
                problem = f"changed {key!r} in {where} to {known} for some parameters, to {value} for others"
                rule = "Each rank steps some of the parameters, and such a number must not depend on which"
                fix = "Step it on DTensors as it is, as Prodigy and D-Adaptation, or keep it in optimizer.state[param]"
                raise ShardkitError(message("optimizer", problem, rule, fix))

    def write(self) -> None:
        """Give the optimizer the numbers that the whole step leaves. In place."""
        _write(_places(self._optimizer), self._idle | self._changed)


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
