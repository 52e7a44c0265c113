"""Read an optimizer's state by FQN, full or sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import is_wrapper
from shardkit.boxes import gather, model_group
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import groups_of, together
from shardkit.runtime.stepping import check_awake
from shardkit.shards import as_sharded, local_value
from shardkit.state.model import parameter_names

# The option of an optimizer's first group for what its state_dict() holds besides parameters' state
# and groups: state under a name, as of MADGRAD, and entries of its own, as of StableSPAM.
# torch.distributed has no place for them.
OTHERS = "beside_parameters"
# in checkpoints, the option of each group for the name of its optimizer's class
CLASS = "optimizer_class"
# {"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn], ...}]}
OptimizerState: TypeAlias = dict[str, Any]


def sharded_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], *, initialize: bool = False
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
        initialize: add entries for trainable parameters without state, in new memory, as a step of
            zero gradients would make them. ``torch.distributed.checkpoint.load`` fills them in
            place, and :func:`load_sharded_optimizer_state_dict` gives them to the optimizer, which
            does not change before.

    Raises:
        ShardkitError: an optimizer holds tensors that are not in the model; with ``initialize``,
            its step needs more than gradients, such as LBFGS's.
    """
    names, optimizers = parameter_names(model), optimizers_of(optimizer)
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for each in optimizers:
        packed = each.state_dict()  # whose hooks run
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        found = renamed_state(
            packed, dict(zip(numbers, chain(*group_names(each, names)), strict=True)).get
        )
        others = {
            key: value for key, value in packed.items() if key not in ("state", "param_groups")
        }
        if named := {key: value for key, value in packed["state"].items() if isinstance(key, str)}:
            others["state"] = named
        for group in [group for group in found["param_groups"] if group["params"]][: bool(others)]:
            group[OTHERS] = others
        groups += found["param_groups"]
        state |= found["state"]
        if initialize:
            pairs = [
                (group, param)
                for group in each.param_groups
                for param in group["params"]
                if param.requires_grad
            ]
            made = {
                names[p]: _initial_state(each, group, p)
                for group, p in pairs
                if not each.state.get(p)
            }
            state |= {fqn: entry for fqn, entry in made.items() if entry}
    return {"state": state, "param_groups": groups}


def full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    rank0_only: bool = True,
    device: torch.device | str = "cpu",
) -> OptimizerState:
    """Return :func:`sharded_optimizer_state_dict` with plain, full copies of the tensors.

    Quantized state, such as torchao's, is given as its values, and all state is then float32.

    **Collective**: every rank calls it. Messages and memory are as in :func:`full_state_dict`.

    Args:
        model: the model whose parameters are optimized.
        optimizer: one, or several of different parameters.
        rank0_only: give the result to the lowest rank that holds a part of the model, and ``{}`` to
            all others.
        device: the device of the tensors.

    Raises:
        ShardkitError: on every rank, as :func:`sharded_optimizer_state_dict`.
    """
    with together(groups_of(model), call="full_optimizer_state_dict") as poll:
        poll.same = {"rank0_only": rank0_only}
        sharded = sharded_optimizer_state_dict(model, optimizer)
        leaves = tensor_leaves(sharded)
        poll.own = any(map(is_quantized, leaves.values()))
        poll.same |= {
            "which tensors are sharded": sorted(
                n for n, t in leaves.items() if isinstance(t, DTensor)
            )
        }
    if poll.any:  # on some rank: torchao keeps shards plain that have no whole blocks
        kept = {path for path, t in leaves.items() if not t.ndim or not t.is_floating_point()}
        leaves = {
            path: tensor if path in kept else values_of(tensor) for path, tensor in leaves.items()
        }
    ranks = model_group([*parameter_names(model), *leaves.values()])
    in_one_order = sorted(leaves.items())
    fulls = dict(
        gather(in_one_order, ranks, everywhere=not rank0_only, device=torch.device(device))
    )
    return (
        with_leaves(sharded, lambda path, _: fulls[path]) if not rank0_only or ranks.is_root else {}
    )


def is_quantized(value: object) -> bool:
    """Whether this rank's part of a tensor is of a subclass that turns into values, such as
    torchao's. Local.
    """
    local = local_value(value) if isinstance(value, Tensor) else None
    return (
        local is not None and is_wrapper(local) and type(local).dequantize is not Tensor.dequantize
    )


@torch.no_grad()
def values_of(
    tensor: Tensor, dtype: torch.dtype = torch.float32, device: str | None = None
) -> Tensor:
    """Return a tensor's values, where they are or on another device, or a DTensor
    of them. Local.
    """
    local = local_value(tensor)
    values = (local.dequantize() if is_quantized(local) else local).to(device=device, dtype=dtype)
    return as_sharded(values, tensor) if isinstance(tensor, DTensor) else values


def optimizers_of(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return one or several optimizers as a list; raise if one is something else, or asleep."""
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if not all(isinstance(each, Optimizer) for each in optimizers):
        raise ShardkitError(
            "optimizer must be one or several of torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}. Pass the model first, then its optimizer."
        )
    for each in optimizers:
        check_awake((), each)
    return optimizers


def group_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """Return the FQNs of each group's parameters; raise if some are not in the model."""
    params = [
        (number, param)
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    ]
    if unknown := [
        f"{tuple(param.shape)} of group {number}" for number, param in params if param not in names
    ]:
        raise ShardkitError(
            f"optimizer has parameters that are not in the model: of shape {listing(unknown)}. An "
            "optimizer must hold the model's own sharded parameters. Make the optimizer after "
            "sharding, from model.parameters(), and not between a forward and the reshard."
        )
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


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
        return {
            key: with_leaves(value, change, leaf, f"{path}/{key}") for key, value in tree.items()
        }
    if type(tree) in (list, tuple):
        return type(tree)(
            with_leaves(each, change, leaf, f"{path}/{number}") for number, each in enumerate(tree)
        )
    return tree


def renamed_state(state: Mapping[str, Any], rename: Callable[[Any], str | None]) -> OptimizerState:
    """Rename parameters in a state; leave out those that ``rename`` maps to None."""
    groups = [
        {**group, "params": [new for name in group["params"] if (new := rename(name)) is not None]}
        for group in state["param_groups"]
    ]
    entries = {
        new: entry for name, entry in state["state"].items() if (new := rename(name)) is not None
    }
    return {"state": entries, "param_groups": groups}


def _initial_state(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Return the state that a first step would make. Local, pure: a copy of the optimizer steps a
    stand-in.
    """
    stand_in = nn.Parameter(torch.zeros_like(param, requires_grad=False))
    stand_in.grad = torch.zeros_like(stand_in)
    copy: Any = object.__new__(type(optimizer))
    # Not the step of an LR scheduler, which is bound to the optimizer itself, nor the user's hooks.
    copy.__dict__.update(
        {key: v for key, v in vars(optimizer).items() if key != "step" and "hook" not in key}
    )
    options = {key: v.clone() if isinstance(v, Tensor) else v for key, v in group.items()}
    copy.param_groups, copy.state = [options | {"params": [stand_in]}], defaultdict(dict)
    copy.__setstate__({})
    try:
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step for each shape
            type(optimizer).step(copy)
    except Exception as error:  # whatever its step needs besides gradients
        raise ShardkitError(
            f"optimizer of type {type(optimizer).__name__} cannot take a step of zero gradients on "
            "each parameter by itself, by which initialize=True makes state "
            f"({type(error).__name__}: {error}). Step it once before, so that it has state."
        ) from error
    return dict(copy.state[stand_in])
