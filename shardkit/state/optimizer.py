"""Read an optimizer's state by FQN, full or sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit._torch import make_adagrad_state
from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import Groups, gather_by_rank, groups_of, together
from shardkit.state.names import parameter_names, repeated
from shardkit.state.quantized import is_quantized, values_of, written
from shardkit.state.routes import Routes, routes_of
from shardkit.state.transfer import Want, gathered

# The option of an optimizer's first group for what its state_dict() holds besides parameters' state and groups: state
# under a name, as of MADGRAD, and entries of its own, as of StableSPAM. torch.distributed has no place for them.
OTHERS = "beside_parameters"
OptimizerState: TypeAlias = dict[str, Any]  # {"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn], ...}]}


def sharded_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], *, initialize: bool = False
) -> OptimizerState:
    """Return the optimizer's sharded state by clean FQN of the parameters. Local.

    ``{"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn, ...], "lr": ..., ...}, ...]}``, the layout of
    torch's ``get_optimizer_state_dict``; torch and shardkit can load each other's. Tensors are live, not copies, and
    DTensors if the optimizer's are. Nothing is initialized: a parameter without state (no gradient yet, frozen, plain
    SGD) has no entry. Groups keep their order and options, and may be empty.

    Args:
        model: the model whose parameters are optimized; a tied parameter has its first name.
        optimizer: one, or several of different parameters, whose groups are concatenated.
        initialize: add entries for trainable parameters without state, in new memory, as a step of zero gradients
            would make them. ``torch.distributed.checkpoint.load`` fills them in place, and
            :func:`load_sharded_optimizer_state_dict` gives them to the optimizer, which does not change before.

    Raises:
        ShardkitError: an optimizer holds tensors that are not in the model, or two hold the same parameter; with
            ``initialize``, its step needs more than gradients, such as LBFGS's.
    """
    names, optimizers = parameter_names(model), optimizers_of(optimizer)
    found = []
    for each in optimizers:
        fqns = chain.from_iterable(group_names(each, names))
        packed = each.state_dict()  # whose hooks run
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        found.append(renamed_state(packed, dict(zip(numbers, fqns, strict=True)).get))
        _keep_others(packed, found[-1]["param_groups"])
    groups = list(chain.from_iterable(each["param_groups"] for each in found))
    if twice := repeated(chain.from_iterable(group["params"] for group in groups)):
        rule = "State is kept by parameter, so each may be in one group of one optimizer"
        fix = "Leave it out of all groups but one"
        raise ShardkitError(message("optimizer", f"{listing(twice)} is in several groups", rule, fix))
    state = {fqn: entry for each in found for fqn, entry in each["state"].items()}
    for each in optimizers if initialize else ():
        state |= {names[param]: entry for param, entry in initial_state(each).items() if entry}
    return {"state": state, "param_groups": groups}


def _keep_others(packed: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    others = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    if named := {key: value for key, value in packed["state"].items() if isinstance(key, str)}:
        others["state"] = named
    for group in [group for group in groups if group["params"]][: bool(others)]:
        group[OTHERS] = others


def full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    rank0_only: bool = True,
    device: torch.device | str = "cpu",
) -> OptimizerState:
    """Return :func:`sharded_optimizer_state_dict` with plain, full copies of the tensors.

    Quantised state, such as torchao's, is gathered as float32 values, and quantized as the optimizer quantizes the
    state of the full parameter: what it would hold without sharding, up to one more rounding.

    **Collective**: every rank calls it. Messages and memory are as in :func:`full_state_dict`.

    Args:
        model: the model whose parameters are optimized.
        optimizer: one, or several of different parameters.
        rank0_only: give the result to the lowest rank that holds a part of the model, and ``{}`` to all others.
        device: the device of the tensors.

    Raises:
        ShardkitError: on every rank, as :func:`sharded_optimizer_state_dict`.
    """
    with together(groups_of(model), call="full_optimizer_state_dict") as poll:
        poll.same = {"rank0_only": rank0_only}
        optimizers = optimizers_of(optimizer)
        sharded = sharded_optimizer_state_dict(model, optimizers)
        poll.own = has_quantized(sharded)
    quantizing: list[Optimizer] = []
    if poll.any:
        quantizing = _quantizing(optimizers, groups_of(model))
        sharded = as_values(sharded, groups_of(model))
    routes = routes_of([*parameter_names(model), *tensor_leaves(sharded).values()])
    full = full_leaves(sharded, routes, Want(not rank0_only, torch.device(device)))
    if rank0_only and not routes.is_root:
        return {}
    full = _quantized_whole(full, model, quantizing, torch.device(device)) if poll.any else full
    return with_flat_state(full, optimizers, parameter_names(model), flat=True)


def with_flat_state(
    full: OptimizerState, optimizers: list[Optimizer], names: Mapping[nn.Parameter, str], *, flat: bool
) -> OptimizerState:
    """Return full state with vectors where the optimizer's step has them (Prodigy's), or in its parameters' shapes."""
    entries = dict(full["state"])
    for optimizer in optimizers:
        kept: frozenset[str] = getattr(optimizer, "flat_state", frozenset())
        for param in (param for group in optimizer.param_groups for param in group["params"] if kept):
            entry = entries.get(names[param], {})
            shape = (-1,) if flat else param.shape
            shaped = {key: entry[key].reshape(shape) for key in entry.keys() & kept if entry[key].ndim}
            entries |= {names[param]: {**entry, **shaped}} if entry else {}
    return {**full, "state": entries}


def full_leaves(tree: Any, routes: Routes, want: Want) -> Any:
    """Return the same nested dicts with full copies of tensors on the ranks that get them, else None. Collective."""
    fulls = dict(gathered(sorted(tensor_leaves(tree).items()), routes, want))  # in one order on all ranks
    return with_leaves(tree, lambda path, _: fulls[path]) if want.everywhere or routes.is_root else None


def has_quantized(tree: object) -> bool:
    """Whether any tensor in nested dicts is quantized on this rank. Local."""
    return any(map(is_quantized, tensor_leaves(tree).values()))


def as_values(tree: Any, groups: Groups) -> Any:
    """Replace tensors that are quantized on any rank by their values. Collective over ``groups``."""
    own = [path for path, tensor in tensor_leaves(tree).items() if is_quantized(tensor)]
    names = {path for of_rank in (gather_by_rank(own, groups).values() if groups else [own]) for path in of_rank}
    return with_leaves(tree, lambda path, tensor: values_of(tensor) if path in names else tensor)


def written_entry(entry: Any, into: Mapping[str, Any]) -> Any:
    """Return a parameter's state, quantized where it is in ``into``, the same parameter's, in its memory. Local."""
    there = tensor_leaves(into)
    return with_leaves(entry, lambda path, values: written(values, there.get(path)))


def _quantizing(optimizers: list[Optimizer], groups: Groups) -> list[Optimizer]:
    """Return those that have quantized state on any rank. Collective over ``groups``."""
    own = [has_quantized(list(each.state.values())) for each in optimizers]
    by_rank = gather_by_rank(own, groups).values() if groups else [own]
    return [each for each, *found in zip(optimizers, *by_rank, strict=False) if any(found)]


def _quantized_whole(
    full: OptimizerState, model: nn.Module, optimizers: list[Optimizer], device: torch.device
) -> OptimizerState:
    """Quantise full values as the optimizer would for the full parameters, one at a time. Local."""
    names, entries = parameter_names(model), dict(full["state"])
    for each in optimizers:
        for group in each.param_groups:
            for fqn, param in ((names[param], param) for param in group["params"] if names[param] in entries):
                whole = torch.zeros(param.shape, dtype=param.dtype, device=device)
                entries[fqn] = written_entry(entries[fqn], _state_of(each, group, whole))
    return {**full, "state": entries}


def optimizers_of(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return one or several optimizers as a list; raise for anything else."""
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer)
    found: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    if wrong := [type(each).__name__ for each in found if not isinstance(each, Optimizer)]:
        rule, fix = "An optimizer is a torch.optim.Optimizer", "Pass the torch.optim.Optimizer that it wraps"
        raise ShardkitError(message("optimizer", f"is of type {listing(wrong)}", rule, fix))
    return found


def group_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """Return the FQNs of each group's parameters; raise if some are not in the model."""
    unexpected = [
        f"param_groups[{number}]['params'][{place}] of shape {tuple(param.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for place, param in enumerate(group["params"])
        if param not in names
    ]
    if unexpected:
        rule = "An optimizer must hold the model's own sharded parameters"
        fix = "Make the optimizer after sharding, from model.parameters(), and not between a forward and the reshard"
        raise ShardkitError(message("optimizer", f"{listing(unexpected)} is not in the model", rule, fix))
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def tensor_leaves(tree: object, is_leaf: Callable[[object], bool] = _is_tensor) -> dict[str, Any]:
    """Return all tensors, or other leaves, in nested dicts, lists and tuples, by path."""
    leaves: dict[str, Any] = {}
    with_leaves(tree, leaves.setdefault, is_leaf)
    return leaves


def with_leaves(
    tree: Any, change: Callable[[str, Any], object], is_leaf: Callable[[object], bool] = _is_tensor, path: str = ""
) -> Any:
    """Return new nested dicts, lists and tuples with ``change(path, leaf)`` for each leaf; other values stay."""
    if is_leaf(tree):
        return change(path, tree)
    if isinstance(tree, dict):
        return {key: with_leaves(value, change, is_leaf, f"{path}/{key}") for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(with_leaves(each, change, is_leaf, f"{path}/{number}") for number, each in enumerate(tree))
    return tree


def renamed_state(state: Mapping[str, Any], rename: Callable[[Any], str | None]) -> OptimizerState:
    """Rename parameters in a state; leave out those that ``rename`` maps to None."""
    groups = [
        {**group, "params": [new for name in group["params"] if (new := rename(name)) is not None]}
        for group in state["param_groups"]
    ]
    entries = {new: entry for name, entry in state["state"].items() if (new := rename(name)) is not None}
    return {"state": entries, "param_groups": groups}


def initial_state(
    optimizer: Optimizer, only: Iterable[nn.Parameter] | None = None
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the state that a first step would make for trainable parameters without state, all or these. Local, pure.

    A copy of the optimizer without state and hooks steps a stand-in for each parameter in turn, so the optimizer, the
    weights and the random generators do not change, and at most one parameter is held besides the result. Raises for
    optimizers that cannot step one parameter by itself, such as LBFGS, which needs a closure.
    """
    wanted = None if only is None else set(only)
    used = {param.device for group in optimizer.param_groups for param in group["params"]}
    devices = [device for device in used if device.type != "cpu"]
    kind = devices[0].type if devices else "cuda"
    with torch.random.fork_rng([device.index for device in devices], device_type=kind):
        return {
            param: _state_of(optimizer, group, param)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad and not optimizer.state.get(param) and (wanted is None or param in wanted)
        }


def _state_of(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
    stand_in = nn.Parameter(torch.zeros_like(param, requires_grad=False))
    stand_in.grad = torch.zeros_like(stand_in)
    copy: Any = object.__new__(type(optimizer))
    # Not the step of an LR scheduler, which is bound to the optimizer itself, nor the user's hooks.
    copy.__dict__.update({key: v for key, v in vars(optimizer).items() if key != "step" and "hook" not in key})
    options = {key: v.clone() if isinstance(v, Tensor) else v for key, v in group.items()}
    copy.param_groups, copy.state = [options | {"params": [stand_in]}], defaultdict(dict)
    copy.__setstate__({})
    make_adagrad_state(copy)
    try:
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step for each shape
            type(optimizer).step(copy)
    except Exception as error:  # whatever its step needs besides gradients
        rule = "initialize=True makes state by a step of zero gradients on each parameter by itself"
        problem = f"{type(optimizer).__name__} cannot take one ({type(error).__name__}: {error})"
        fix = "Step it once before, so that it has state"
        raise ShardkitError(message("optimizer", problem, rule, fix)) from error
    return dict(copy.state[stand_in])
