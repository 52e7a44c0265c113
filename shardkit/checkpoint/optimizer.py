"""What of a checkpoint goes where in an optimizer: all decided before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.checkpoint.inner import MARK, Pending, pending
from shardkit.checkpoint.match import KeyMap, rename
from shardkit.checkpoint.source import Stored, by_name
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import as_sharded, local_value, replicated
from shardkit.state.names import parameter_names
from shardkit.state.optimizer import group_names, optimizers_of, sharded_optimizer_state_dict


@dataclass(frozen=True)
class OptimizerLoad:
    """What will be loaded.

    Attributes:
        optimizers: into which.
        state: for each parameter's FQN its new state: plain values, and tensors that are to be filled.
        options: for each parameter's FQN the options of the group that it was in.
        targets: the tensors to fill, with the keys of what fills them.
    """

    optimizers: list[Optimizer]
    names: dict[nn.Parameter, str]
    state: dict[str, dict[str, Any]]
    options: dict[str, dict[str, Any]]
    targets: list[tuple[str, Tensor]]

    def apply(self) -> None:
        """Give each optimizer its state and its groups their options. Local; the tensors are filled."""
        made = replace(self, state={fqn: finished(entries) for fqn, entries in self.state.items()})
        for optimizer in self.optimizers:
            made.apply_to(optimizer)

    def apply_to(self, optimizer: Optimizer) -> None:
        """Give one optimizer its state; nothing of it is pending. Local."""
        packed = optimizer.state_dict()
        fqns = [fqn for group in group_names(optimizer, self.names) for fqn in group]
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        groups = [
            {**group, **self._group_options(names), "params": group["params"]}
            for group, names in zip(packed["param_groups"], group_names(optimizer, self.names), strict=True)
        ]
        state = {n: self.state[fqn] for n, fqn in zip(numbers, fqns, strict=True) if fqn in self.state}
        optimizer.load_state_dict({**packed, "state": state, "param_groups": groups})
        self._undo_casts(optimizer)

    def _group_options(self, names: list[str]) -> dict[str, Any]:
        return next((self.options[name] for name in names if name in self.options), {})

    def _undo_casts(self, optimizer: Optimizer) -> None:
        """Put back what torch's load_state_dict casts to the parameter's dtype, such as float32 moments of bf16."""
        for param, fqn in self.names.items():
            entries = optimizer.state.get(param, {})
            for name, value in self.state.get(fqn, {}).items() if entries else ():
                if name != "step" and isinstance(value, Tensor) and entries[name].dtype != value.dtype:
                    entries[name] = value


@dataclass(frozen=True)
class Fit:
    """How a checkpoint and what it is loaded into may differ: arguments of ``load_checkpoint``, and the path."""

    key_map: KeyMap | None
    strict: bool
    cast: bool
    where: str


def plan_optimizer(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], stored: Mapping[str, Any], fit: Fit
) -> OptimizerLoad:
    """Match what is stored with an optimizer, fresh or not. Local; changes nothing.

    State that the optimizer has already is filled in place, where shape and dtype are the same. New state is sharded
    as its parameter; of another shape (factored moments) it is on every rank.

    Raises:
        CheckpointError: listing parameters that only one side knows, and groups that were cut in another way.
    """
    names = parameter_names(model)
    stored = _renamed(by_name(dict(stored), list(dict.fromkeys(names.values()))), fit.key_map)
    current = sharded_optimizer_state_dict(model, optimizer)
    by_fqn = {fqn: param for param, fqn in names.items()}
    targets: list[tuple[str, Tensor]] = []
    misfits: list[str] = []

    def filled(value: Any, old: object, param: nn.Parameter | None, on_device: bool = False) -> Any:
        """The value with memory for its tensors, which is listed in ``targets``."""
        if isinstance(value, Stored):
            targets.append((value.key, _target(value, param, old, on_device)))
            return targets[-1][1]
        if isinstance(value, dict) and MARK in value and param is not None:
            try:
                made, rows = pending(value, param, f"{fit.where}: {names[param]}")
            except CheckpointError as error:
                return misfits.append(str(error))
            targets.extend(rows)
            return made
        if isinstance(value, dict):
            return {key: filled(each, None, param, on_device) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(filled(each, None, param, on_device) for each in value)
        return value

    given: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for group in stored["param_groups"]:
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        given |= dict.fromkeys(group["params"], own)
        options |= dict.fromkeys(group["params"], filled(own, None, None))
    _check(current, stored, given, fit)
    state = {}
    for group in current["param_groups"]:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for fqn in (each for each in group["params"] if each in stored["state"]):
            old = current["state"].get(fqn, {})
            entries = stored["state"][fqn].items()
            state[fqn] = {name: filled(value, old.get(name), by_fqn[fqn], on_device) for name, value in entries}
    if misfits:
        raise CheckpointError("\n".join(dict.fromkeys(misfits)))
    return OptimizerLoad(optimizers_of(optimizer), names, state, options, targets)


def differ(values: Iterable[Any]) -> bool:
    """Whether not all are equal."""
    found = list(values)
    return any(value != found[0] for value in found)


def finished(value: Any) -> Any:
    """State whose tensors are filled, with each :class:`Pending` made."""
    if isinstance(value, Pending):
        return value.tensor()
    if isinstance(value, dict):
        return {key: finished(each) for key, each in value.items()}
    return type(value)(map(finished, value)) if type(value) in (list, tuple) else value


def _renamed(stored: dict[str, Any], key_map: KeyMap | None) -> dict[str, Any]:
    """The state of an optimizer under other names; what has none is left out."""

    def kept(fqns: Iterable[str]) -> list[str]:
        return [new for new in (rename(fqn, key_map) for fqn in fqns) if new is not None]

    state = {rename(fqn, key_map): entries for fqn, entries in stored["state"].items()}
    groups = [{**group, "params": kept(group["params"])} for group in stored["param_groups"]]
    return {"state": {fqn: entries for fqn, entries in state.items() if fqn is not None}, "param_groups": groups}


def _check(current: Mapping[str, Any], stored: Mapping[str, Any], options: Mapping[str, Any], fit: Fit) -> None:
    have = [fqn for group in current["param_groups"] for fqn in group["params"]]
    lost = [fqn for fqn in dict.fromkeys([*options, *stored["state"]]) if fqn not in have]
    new = [fqn for fqn in have if fqn not in options]
    split = [
        f"param_groups[{number}]"
        for number, group in enumerate(current["param_groups"])
        if differ(options[fqn] for fqn in group["params"] if fqn in options)
    ]
    problems = []
    if fit.strict and lost:
        problems.append(f"it has state of {listing(lost)}, not in the optimizer")
    if fit.strict and new:
        problems.append(f"it does not know {listing(new)}, in the optimizer")
    if split:
        problems.append(f"{listing(split)} holds parameters that were in groups of other options")
    if problems:
        rule = "An optimizer is loaded into one of the same parameters and groups; nothing was changed"
        fix = "Build it as it was built, with the same parameters frozen, "
        fix += "or pass strict=False to leave out what one side lacks"
        raise CheckpointError(message(fit.where, "; ".join(problems), rule, fix))


def _target(stored: Stored, param: nn.Parameter | None, old: object, on_device: bool) -> Tensor:
    """The tensor that a stored one is read into; without a parameter, an option of a group."""
    if isinstance(old, Tensor) and (old.shape, old.dtype) == (stored.shape, stored.dtype):
        return old
    if param is None or (not stored.shape and not on_device):  # torch keeps counts of steps on the CPU
        return torch.empty(stored.shape, dtype=stored.dtype)
    if not isinstance(param, DTensor):
        return torch.empty(stored.shape, dtype=stored.dtype, device=param.device)
    if stored.shape == param.shape:
        return as_sharded(torch.empty_like(local_value(param), dtype=stored.dtype, requires_grad=False), param)
    full = torch.empty(stored.shape, dtype=stored.dtype, device=param.to_local().device)
    return replicated(full, param.device_mesh) if stored.shape else full
