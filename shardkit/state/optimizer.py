"""An optimizer's state by FQN, full or sharded, read without changing the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import groups_of, together
from shardkit.state.names import parameter_names, repeated
from shardkit.state.routes import Routes, routes_of
from shardkit.state.transfer import Want, gathered

OptimizerState: TypeAlias = dict[str, Any]  # {"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn], ...}]}


def sharded_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], *, initialize: bool = False
) -> OptimizerState:
    """Return the optimizer's state as it is sharded, by clean FQN of the parameters. Local.

    ``{"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn, ...], "lr": ..., ...}, ...]}``, the layout of
    torch's ``get_optimizer_state_dict``, which either side may load. Live tensors, not copies: DTensors where the
    optimizer holds such. Nothing is initialized: a parameter without state (no gradient yet, frozen, plain SGD) has
    no entry. Groups keep their order, their options whatever they are, and may be empty.

    Args:
        model: the model whose parameters are optimized; a tied one has its first name.
        optimizer: one, or several of different parameters, whose groups follow one another.
        initialize: give entries also to parameters that train and have no state yet, in new memory: what a step of
            zero gradients would make. ``torch.distributed.checkpoint.load`` fills them in place, and
            :func:`load_sharded_optimizer_state_dict` then gives them to the optimizer, which does not change before.

    Raises:
        ShardkitError: an optimizer holds tensors that are not in the model, or two hold the same parameter; for
            ``initialize``, its step needs more than gradients, as LBFGS's.
    """
    names, optimizers = parameter_names(model), optimizers_of(optimizer)
    found = [_by_name(each, names) for each in optimizers]
    groups = list(chain.from_iterable(each["param_groups"] for each in found))
    if twice := repeated(chain.from_iterable(group["params"] for group in groups)):
        rule = "State is kept by parameter, so each may be in one group of one optimizer"
        raise ShardkitError(message("optimizer", f"{listing(twice)} is in several groups", rule, "Pass it to one"))
    state = {fqn: entry for each in found for fqn, entry in each["state"].items()}
    for each in optimizers if initialize else ():
        state |= {names[param]: entry for param, entry in initial_state(each).items() if entry}
    return {"state": state, "param_groups": groups}


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
    routes = routes_of([*parameter_names(model), *tensor_leaves(sharded).values()])
    full = full_leaves(sharded, routes, Want(not rank0_only, torch.device(device)))
    return {} if rank0_only and not routes.is_root else full


def full_leaves(tree: Any, routes: Routes, want: Want) -> Any:
    """The same nested dicts with full tensors, copies, on the ranks that get them; None elsewhere. Collective."""
    fulls = dict(gathered(sorted(tensor_leaves(tree).items()), routes, want))  # in an order that all ranks share
    return with_leaves(tree, lambda path, _: fulls[path]) if want.everywhere or routes.is_root else None


def optimizers_of(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """One or several optimizers as a list; raises for anything else."""
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer)
    found: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    if wrong := [type(each).__name__ for each in found if not isinstance(each, Optimizer)]:
        raise ShardkitError(
            message("optimizer", f"of type {listing(wrong)}", "Optimizers are torch.optim.Optimizer", "Pass such")
        )
    return found


def group_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """The FQNs of each group's parameters; raises if some are not in the model."""
    unexpected = [
        f"param_groups[{number}]['params'][{place}] of shape {tuple(param.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for place, param in enumerate(group["params"])
        if param not in names
    ]
    if unexpected:
        rule = "An optimizer must hold the model's own, sharded parameters"
        fix = "Make the optimizer after sharding, from model.parameters(), and not between a forward and the reshard"
        raise ShardkitError(message("optimizer", f"{listing(unexpected)} is not in the model", rule, fix))
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def is_tensor(value: object) -> bool:
    """Whether it is a tensor."""
    return isinstance(value, Tensor)


def tensor_leaves(tree: object, is_leaf: Callable[[object], bool] = is_tensor) -> dict[str, Any]:
    """All tensors, or other leaves, in nested dicts, lists and tuples, by path."""
    leaves: dict[str, Any] = {}
    with_leaves(tree, leaves.setdefault, is_leaf)
    return leaves


def with_leaves(
    tree: Any, change: Callable[[str, Any], object], is_leaf: Callable[[object], bool] = is_tensor, path: str = ""
) -> Any:
    """The same nested dicts, lists and tuples, new ones, with each leaf changed; other values stay."""
    if is_leaf(tree):
        return change(path, tree)
    if isinstance(tree, dict):
        return {key: with_leaves(value, change, is_leaf, f"{path}/{key}") for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(with_leaves(each, change, is_leaf, f"{path}/{number}") for number, each in enumerate(tree))
    return tree


def renamed_state(state: Mapping[str, Any], rename: Callable[[Any], str | None]) -> OptimizerState:
    """The state by other names; what has none is left out."""
    groups = [
        {**group, "params": [new for name in group["params"] if (new := rename(name)) is not None]}
        for group in state["param_groups"]
    ]
    entries = {new: entry for name, entry in state["state"].items() if (new := rename(name)) is not None}
    return {"state": entries, "param_groups": groups}


def _by_name(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> OptimizerState:
    """``optimizer.state_dict()``, whose hooks run, with FQNs for numbers."""
    fqns = chain.from_iterable(group_names(optimizer, names))
    packed = optimizer.state_dict()
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    return renamed_state(packed, dict(zip(numbers, fqns, strict=True)).get)


def initial_state(optimizer: Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """For each parameter that trains and has no state, what a first step would give it. Local, pure.

    A copy of the optimizer without parameters, state and hooks steps a stand-in of each parameter in turn, so neither
    the optimizer nor weights and random generators change, and beyond the result one parameter is held. Raises for
    optimizers that do not step on one parameter by itself, as LBFGS, which wants a closure.
    """
    used = {param.device for group in optimizer.param_groups for param in group["params"]}
    devices = [device for device in used if device.type != "cpu"]
    kind = devices[0].type if devices else "cuda"
    with torch.random.fork_rng([device.index for device in devices], device_type=kind):
        return {
            param: _state_of(optimizer, group, param)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad and not optimizer.state.get(param)
        }


def _state_of(optimizer: Optimizer, group: dict[str, Any], param: nn.Parameter) -> dict[str, Any]:
    stand_in = nn.Parameter(torch.zeros_like(param, requires_grad=False))
    stand_in.grad = torch.zeros_like(stand_in)
    copy: Any = object.__new__(type(optimizer))
    # An LR scheduler's or our own step is bound to the optimizer itself, and hooks are the user's.
    copy.__dict__.update({key: v for key, v in vars(optimizer).items() if key != "step" and "hook" not in key})
    options = {key: v.clone() if isinstance(v, Tensor) else v for key, v in group.items()}
    copy.param_groups, copy.state = [options | {"params": [stand_in]}], defaultdict(dict)
    copy.__setstate__({})
    try:
        type(optimizer).step(copy)
    except Exception as error:  # whatever its step needs besides gradients
        rule = "State is made by a step of zero gradients on each parameter by itself"
        problem = f"{type(optimizer).__name__} cannot take one ({type(error).__name__}: {error})"
        raise ShardkitError(
            message("optimizer", problem, rule, "Step it once, or load with load_checkpoint, which needs no state")
        ) from error
    return dict(copy.state[stand_in])
