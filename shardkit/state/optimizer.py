"""Read an optimizer's state by FQN, full or sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.boxes import gather, model_group, refuse_quantized
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import check_equal, groups_of, raise_on_all_ranks
from shardkit.runtime.stepping import check_awake
from shardkit.state.model import parameter_names

# {"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn], ...}]}
OptimizerState: TypeAlias = dict[str, Any]


def sharded_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]
) -> OptimizerState:
    """Return the optimizer's sharded state by clean FQN of the parameters. Local.

    ``{"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn, ...], "lr": ..., ...},
    ...]}``, the layout of torch's ``get_optimizer_state_dict``; torch and shardkit can load each
    other's. Tensors are live, not copies, and DTensors if the optimizer's are. Nothing is
    initialized: a parameter without state (no gradient yet, frozen, plain SGD) has no entry. Groups
    keep their order and options, and may be empty.

    Args:
        model: the model whose parameters are optimized; a tied parameter has its first name.
        optimizer: one, or several of different parameters, whose groups are concatenated.

    Raises:
        ShardkitError: an optimizer holds tensors that are not in the model, or has state besides
            that of its parameters, such as MADGRAD.
    """
    names = parameter_names(model)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for source in optimizers_of(optimizer):
        packed = source.state_dict()  # whose hooks run
        fqns: dict[Any, str] = {}
        for group, params in zip(packed["param_groups"], group_names(source, names), strict=True):
            fqns.update(zip(group["params"], params, strict=True))
            groups.append({**group, "params": params})
        others = [key for key in packed if key not in ("state", "param_groups")]
        for number, values in packed["state"].items():
            if number in fqns:
                state[fqns[number]] = values
            else:
                others.append(number)
        if others:
            raise ShardkitError(
                f"{type(source).__name__} has {listing(map(repr, others))} in its state_dict(), "
                "which belongs to no parameter and so has no name. Save optimizer.state_dict() of "
                "each rank with torch.save."
            )
    return {"state": state, "param_groups": groups}


def full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    rank0_only: bool = True,
    device: torch.device | str = "cpu",
) -> OptimizerState:
    """Return :func:`sharded_optimizer_state_dict` with plain, full copies of the tensors.

    **Collective**: every rank calls it. Messages and memory are as in :func:`full_state_dict`.

    Args:
        model: the model whose parameters are optimized.
        optimizer: one, or several of different parameters.
        rank0_only: give the result to the lowest rank that holds a part of the model, and ``{}`` to
            all others.
        device: the device of the tensors.

    Raises:
        ShardkitError: on every rank, as :func:`sharded_optimizer_state_dict`, or for quantized
            state, such as torchao's.
    """
    groups = groups_of(model)
    with raise_on_all_ranks(groups, call="full_optimizer_state_dict"):
        sharded = sharded_optimizer_state_dict(model, optimizer)
        tensors = tensor_leaves(sharded)
        refuse_quantized(tensors.items())
        dtensors = [path for path, tensor in tensors.items() if isinstance(tensor, DTensor)]
    same = {"rank0_only": rank0_only, "which tensors are sharded": sorted(dtensors)}
    check_equal(same, groups)
    ranks = model_group([*parameter_names(model), *tensors.values()])
    in_one_order = sorted(tensors.items())  # optimizers may have made their state in another one
    fulls = dict(
        gather(in_one_order, ranks, everywhere=not rank0_only, device=torch.device(device))
    )
    if rank0_only and not ranks.is_root:
        return {}
    full: OptimizerState = with_leaves(sharded, lambda path, _: fulls[path])
    return full


def optimizers_of(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return one or several optimizers as a list; raise if one is something else, or asleep."""
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for given in optimizers:
        if not isinstance(given, Optimizer):
            raise ShardkitError(
                "optimizer must be one or several of torch.optim.Optimizer, got "
                f"{type(given).__name__}. Pass the model first, then its optimizer."
            )
        check_awake((), given)
    return optimizers


def group_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """Return the FQNs of each group's parameters; raise if some are not in the model."""
    groups: list[list[str]] = []
    unknown = []
    for number, group in enumerate(optimizer.param_groups):
        groups.append([])
        for param in group["params"]:
            if param in names:
                groups[-1].append(names[param])
            else:
                unknown.append(f"{tuple(param.shape)} of group {number}")
    if unknown:
        raise ShardkitError(
            f"optimizer has parameters that are not in the model: of shape {listing(unknown)}. An "
            "optimizer must hold the model's own sharded parameters. Make the optimizer after "
            "sharding, from model.parameters(), and not between a forward and the reshard."
        )
    return groups


def tensor_leaves(tree: object, leaf: type = Tensor) -> dict[str, Any]:
    """Return all tensors, or other leaves, in nested dicts, lists and tuples, by path."""
    leaves: dict[str, Any] = {}
    with_leaves(tree, leaves.setdefault, leaf)
    return leaves


def with_leaves(
    tree: Any, change: Callable[[str, Any], object], leaf: type = Tensor, path: str = ""
) -> Any:
    """Return new nested dicts, lists and tuples with ``change(path, leaf)`` for each leaf; other
    values stay.
    """
    if isinstance(tree, leaf):
        return change(path, tree)
    if isinstance(tree, dict):
        changed = {}
        for key, value in tree.items():
            changed[key] = with_leaves(value, change, leaf, f"{path}/{key}")
        return changed
    if type(tree) in (list, tuple):
        values = []
        for number, value in enumerate(tree):
            values.append(with_leaves(value, change, leaf, f"{path}/{number}"))
        return type(tree)(values)
    return tree


def renamed_state(state: Mapping[str, Any], rename: Callable[[Any], str | None]) -> OptimizerState:
    """Rename parameters in a state; leave out those that ``rename`` maps to None."""
    renamed: OptimizerState = {"state": {}, "param_groups": []}
    for name, values in state["state"].items():
        new = rename(name)
        if new is not None:
            renamed["state"][new] = values
    for group in state["param_groups"]:
        params = [rename(name) for name in group["params"]]
        kept = [name for name in params if name is not None]
        renamed["param_groups"].append({**group, "params": kept})
    return renamed
