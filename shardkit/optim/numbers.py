"""The numbers that a step in several parts changes besides parameters and their state, such as a count of steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardkit.errors import ShardkitError, message

ATTRIBUTES, STATE = "an attribute", "optimizer.state"
Changes = dict[tuple[int | str, str], Any]  # by group, or one of the two other places, and name


class Numbers:
    """An optimizer's numbers before a step, with which each part of it begins, and what the parts make of them.

    They are in its groups, in its attributes, and in its state under a name instead of a parameter. A part steps those
    matrices of a bucket that a rank owns. A number must change once, and in the same way on every rank, so parts that
    disagree raise. Only parts that step parameters of a group change its numbers, unless none of its parameters is
    stepped.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.groups, self.state = optimizer.param_groups, optimizer.state
        self.before = {place: _numbers(held) for place, held in self._places().items()}
        self.changed: Changes = {}
        self.of_idle: Changes = {}
        self.stepped: set[int | str] = {ATTRIBUTES, STATE}

    def _places(self) -> dict[int | str, dict[str, Any]]:
        places: dict[int | str, dict[str, Any]] = dict(enumerate(self.optimizer.param_groups))
        return places | {ATTRIBUTES: vars(self.optimizer), STATE: self.optimizer.state}

    def begin(self) -> None:
        """Give the optimizer copies of its groups and of its named state, for a part to change."""
        self.optimizer.param_groups = [{**group, **_tensors(group)} for group in self.groups]
        named = {key: value for key, value in self.state.items() if not isinstance(key, Tensor)}
        self.optimizer.state = type(self.state)(dict, named | _tensors(named))

    def end(self) -> Changes:
        """Undo what the part that began has changed; return what it changed for the parameters that it stepped."""
        found: Changes = {}
        for place, held in self._places().items():
            is_idle = isinstance(place, int) and not held["params"]
            (self.of_idle if is_idle else found).update(_changed(place, self.before[place], _numbers(held)))
        self.optimizer.param_groups, self.optimizer.state = self.groups, self.state
        for place, key in found:
            if place == ATTRIBUTES and key not in self.before[ATTRIBUTES]:
                del vars(self.optimizer)[key]
        _set(vars(self.optimizer), self.before[ATTRIBUTES])
        return found

    def add(self, changes: Changes, stepped: Iterable[int]) -> None:
        """Note what a part changed, on this rank or another, and the groups that the parts of a bucket stepped."""
        self.stepped |= {*stepped}
        for (place, key), value in changes.items():
            if not _same(known := self.changed.setdefault((place, key), value), value):
                where = f"group {place}" if isinstance(place, int) else place
                problem = f"changed {key!r} in {where} to {known} for some parameters, to {value} for others"
                rule = "Each rank steps some of the parameters, and such a number must not depend on which"
                fix = "Step it on DTensors as it is, as Prodigy and D-Adaptation, or keep it in optimizer.state[param]"
                raise ShardkitError(message("optimizer", problem, rule, fix))

    def write(self) -> None:
        """Give the optimizer the numbers that the whole step leaves. In place."""
        places = self._places()
        for (place, key), value in self.changed.items():
            _set(places[place], {key: value})
        for (place, key), value in self.of_idle.items():
            if place not in self.stepped:
                _set(places[place], {key: value})


def _changed(place: int | str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    return {(place, key): value for key, value in new.items() if key not in old or not _same(old[key], value)}


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or bool(a != a and b != b)  # NaN


def _numbers(held: Mapping[Any, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in held.items() if isinstance(value, (bool, int, float))}
    return plain | {key: value.cpu() for key, value in _tensors(held).items()}


def _tensors(held: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return copies of the tensors of one element."""
    tensors = {key: value for key, value in held.items() if isinstance(value, Tensor) and value.numel() == 1}
    return {key: value.detach().clone() for key, value in tensors.items()}


def _set(held: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(old := held.get(key), Tensor):
            with torch.no_grad():
                old.copy_(value)
        else:
            held[key] = value
