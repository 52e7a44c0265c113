"""An optimizer's state by FQN, full or sharded, read without changing the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import groups_of, together
from shardkit.state.fresh import initial_state
from shardkit.state.gather import Want, gathered
from shardkit.state.names import parameter_names, repeated
from shardkit.state.routes import find_lead

OptimizerState: TypeAlias = dict[str, Any]  # {"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn], ...}]}


def sharded_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], *, initialize: bool = False
) -> OptimizerState:
    """The optimizer's state as it lies on the ranks, by clean FQN of the parameters. Local.

    ``{"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn, ...], "lr": ..., ...}, ...]}``, the layout of
    torch's ``get_optimizer_state_dict``, which either side may load. Live tensors, not copies: DTensors where the
    optimizer holds such. Nothing is initialized: a parameter without state (no gradient yet, frozen, plain SGD) has
    no entry. Groups keep their order, their options whatever they are, and may be empty.

    Args:
        model: the model whose parameters are optimized; a tied one goes by its first name.
        optimizer: one, or several of different parameters, whose groups follow one another.
        initialize: give entries also to parameters that train and have no state yet, in new memory: what a step of
            zero gradients would make. ``torch.distributed.checkpoint.load`` fills them in place, and
            :func:`load_sharded_optimizer_state_dict` then gives them to the optimizer, which does not change before.

    Raises:
        ShardkitError: an optimizer holds tensors that are not in the model, or two hold the same parameter; for
            ``initialize``, its step needs more than gradients, as LBFGS's.
    """
    names = parameter_names(model)
    found = [_by_name(each, names) for each in optimizers_of(optimizer)]
    if initialize:
        for each, state in zip(optimizers_of(optimizer), found, strict=True):
            state["state"] |= {names[param]: entry for param, entry in initial_state(each).items() if entry}
    groups = list(chain.from_iterable(each["param_groups"] for each in found))
    if twice := repeated(chain.from_iterable(group["params"] for group in groups)):
        rule = "State is kept by parameter, so each may be in one group of one optimizer"
        raise ShardkitError(message("optimizer", f"{listing(twice)} is in several groups", rule, "Pass it to one"))
    return {"state": {k: v for each in found for k, v in each["state"].items()}, "param_groups": groups}


def full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    rank0_only: bool = True,
    device: torch.device | str = "cpu",
) -> OptimizerState:
    """As :func:`sharded_optimizer_state_dict`, in plain, full tensors, which are copies.

    **Collective**: every rank calls it. Tensors travel as in :func:`full_state_dict`, with the same memory.

    Args:
        model: the model whose parameters are optimized.
        optimizer: one, or several of different parameters.
        rank0_only: give the result to the lowest rank that holds a part of the model, and ``{}`` to all others.
        device: where the tensors of the result are.

    Raises:
        ShardkitError: on every rank, as :func:`sharded_optimizer_state_dict`.
    """
    with together(groups_of(model), call="full_optimizer_state_dict"):
        sharded = sharded_optimizer_state_dict(model, optimizer)
    leaves = tensor_leaves(sharded)
    lead = find_lead([*parameter_names(model), *leaves.values()])
    fulls = dict(gathered(leaves.items(), lead, Want(not rank0_only, torch.device(device))))
    if rank0_only and not lead.is_here:
        return {}
    return with_leaves(sharded, lambda path, _: fulls[path])  # type: ignore[no-any-return]


def optimizers_of(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """One or several optimizers as a list.

    Raises:
        ShardkitError: for anything else.
    """
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer)
    found: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    if wrong := [type(each).__name__ for each in found if not isinstance(each, Optimizer)]:
        raise ShardkitError(
            message("optimizer", f"of type {listing(wrong)}", "Optimizers are torch.optim.Optimizer", "Pass such")
        )
    return found


def group_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """The FQNs of each group's parameters.

    Raises:
        ShardkitError: some are not in the model.
    """
    strangers = [
        f"param_groups[{number}]['params'][{place}] of shape {tuple(param.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for place, param in enumerate(group["params"])
        if param not in names
    ]
    if strangers:
        rule = "An optimizer must hold the model's own, sharded parameters"
        fix = "Make the optimizer after sharding, from model.parameters(), and not between a forward and the reshard"
        raise ShardkitError(message("optimizer", f"{listing(strangers)} is not in the model", rule, fix))
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def tensor_leaves(tree: object) -> dict[str, Tensor]:
    """All tensors in nested dicts, lists and tuples, by path."""
    leaves: dict[str, Tensor] = {}
    with_leaves(tree, lambda path, tensor: leaves.setdefault(path, tensor))
    return leaves


def with_leaves(tree: Any, change: Callable[[str, Tensor], object], path: str = "") -> Any:
    """The same nested dicts, lists and tuples, new ones, with each tensor changed; other values stay."""
    if isinstance(tree, Tensor):
        return change(path, tree)
    if isinstance(tree, dict):
        return {key: with_leaves(value, change, f"{path}/{key}") for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(with_leaves(value, change, f"{path}/{number}") for number, value in enumerate(tree))
    return tree


def _by_name(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> OptimizerState:
    """``optimizer.state_dict()``, whose hooks run, with FQNs for numbers."""
    fqns = group_names(optimizer, names)
    packed = optimizer.state_dict()
    groups = [{**group, "params": own} for group, own in zip(packed["param_groups"], fqns, strict=True)]
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, chain.from_iterable(fqns), strict=True))
    return {"state": {by_number[k]: v for k, v in packed["state"].items() if k in by_number}, "param_groups": groups}
