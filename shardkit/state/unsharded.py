"""full_params: replace a model's sharded parameters by plain, full ones in a context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._fsdp import fsdp_params, fsdp_units
from shardkit._fsdp.states import PLACEHOLDER, is_under_way, without_hooks
from shardkit.boxes import EACH_ALONE, Move, gather, model_group, refuse_quantized, scatter
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import check_equal, groups_of, raise_on_all_ranks
from shardkit.runtime.hooks import allowing_create_graph
from shardkit.runtime.stepping import check_awake
from shardkit.state.model import parameter_names, refuse_meta


@contextmanager
def full_params(
    model: nn.Module,
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
) -> Iterator[None]:
    """In this context the model's sharded parameters are plain parameters, of the full tensors.

    Like FSDP1's ``summon_full_params``, for any module with FSDP2 units. Names, ties, dtypes,
    ``requires_grad`` and attributes are those of the sharded parameters. FSDP2's hooks do nothing
    inside: modules, methods such as ``generate``, and parts that are not units run without
    collectives of FSDP2 (to transformers' ``generate`` pass ``synced_gpus=False``, or it makes its
    own); gradients are not reduced, and dropped on exit. Modules of ``parallelize_module`` still make
    DTensors, which do not mix with full parameters. Do not step an optimizer inside. On exit the same
    sharded parameters are registered again. **Collective**, on entry and, with both ``writeback`` and
    ``rank0_only``, on exit.

    Args:
        model: any module, on any mesh, with any ties.
        writeback: copy changes into the shards, in place, unless there was an error; with
            ``rank0_only`` those of rank
            0. Else they are lost.
        rank0_only: give full parameters only to the lowest rank that holds a part of the model;
            others keep shards.
        offload_to_cpu: put full tensors on the CPU, wherever the shards are.
        with_grads: gather existing gradients too, as ``grad`` of the full parameters, and write
            them back too.
        recurse: False gathers only the parameters of ``model``'s own unit; units inside of it stay
            sharded.

    Raises:
        ShardkitError: on every rank: inside of a forward or backward; on meta; if ranks pass
            different arguments or, with ``with_grads``, have different gradients; on exit, if a
            full parameter has another shape, or is gone, or for any error inside where ranks
            exchange it, with both ``writeback`` and ``rank0_only``.

    Examples:
        >>> with full_params(model, writeback=True):
        ...     model.embed.weight[0].data.zero_()
    """
    groups = groups_of(model)
    with raise_on_all_ranks(groups, call="full_params"):
        names = _params_to_replace(model, recurse)
        grads = {}
        for param, name in names.items():
            if with_grads and param.grad is not None and not hasattr(param.grad, PLACEHOLDER):
                grads[name] = param.grad
    same = {
        "rank0_only": rank0_only,
        "writeback": writeback,
        "with_grads": with_grads,
        "recurse": recurse,
        "which parameters have gradients": list(grads),
    }
    check_equal(same, groups)
    ranks, device = model_group(names), torch.device("cpu") if offload_to_cpu else None
    shards: dict[str, Tensor] = {name: param for param, name in names.items()}
    for name, grad in grads.items():
        shards[f"grad of {name}"] = grad
    fulls = dict(gather(shards.items(), ranks, everywhere=not rank0_only, device=device))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # without hooks it does nothing
    moves: list[Move] = []
    with raise_on_all_ranks(groups if writeback and rank0_only else []):
        changed: dict[str, Tensor | None] = {}
        with (
            allowing_create_graph(fsdp_units(model) if recurse else []),
            without_hooks([*model.modules()] if recurse else [model]),
            _replaced(model, names, fulls) as places,
        ):
            yield
            for param, (module, attribute) in places.items():
                name, full = names[param], getattr(module, attribute, None)
                changed[name] = full
                if name in grads:
                    changed[f"grad of {name}"] = getattr(full, "grad", None)
        if writeback:
            moves = _moves(shards, changed)
    scatter(moves, ranks if rank0_only else EACH_ALONE)


def _params_to_replace(model: nn.Module, recurse: bool) -> dict[nn.Parameter, str]:
    """Return the names of the sharded parameters; raise if they cannot be replaced. Local."""
    if is_under_way(model):
        raise ShardkitError(
            "full_params was called in a forward or backward. Parameters cannot be replaced while "
            "in use. Call it before the forward or after backward."
        )
    own = {param.sharded_param for param in fsdp_params([model])}
    names: dict[nn.Parameter, str] = {}
    for param, name in parameter_names(model).items():
        if isinstance(param, DTensor) and (recurse or param in own):
            names[param] = name
    check_awake(names)
    named = [(name, param) for param, name in names.items()]
    refuse_meta(named)
    refuse_quantized(named)
    return names


def _moves(shards: Mapping[str, Tensor], changed: Mapping[str, Tensor | None]) -> list[Move]:
    """Return what is written back, given the full tensors of this rank, if it has any. Local."""
    fulls: dict[str, Tensor] = {}
    lost = []
    for name, full in changed.items():
        if full is None or full.shape != shards[name].shape:
            lost.append(name)
        else:
            fulls[name] = full.detach().to(shards[name].dtype)
    if lost:
        raise ShardkitError(
            f"{listing(lost)} has another shape, or is gone. A tensor that is written back must "
            "have the shape of the sharded parameter. Resize parameters before sharding."
        )
    return [Move(shard, fulls.get(name), shard.dtype) for name, shard in shards.items()]


@contextmanager
def _replaced(
    model: nn.Module, names: Mapping[nn.Parameter, str], fulls: Mapping[str, Tensor]
) -> Iterator[dict[nn.Parameter, tuple[nn.Module, str]]]:
    """Register full parameters in the place of sharded ones, on ranks that have them; yield one
    place of each.
    """
    full_of: dict[nn.Parameter, nn.Parameter] = {}
    for param, name in names.items():
        if name in fulls:
            full_of[param] = full = nn.Parameter(fulls[name], requires_grad=param.requires_grad)
            vars(full).update(vars(param))
            full.grad = fulls.get(f"grad of {name}")
    slots = []
    places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for attribute, own in module._parameters.items():
            if own is not None and own in full_of:
                slots.append((module, attribute, own))
                places.setdefault(own, (module, attribute))
    try:
        for module, attribute, param in slots:
            _register(module, attribute, full_of[param])
        yield places
    finally:
        for module, attribute, param in slots:
            _register(module, attribute, param)


def _register(module: nn.Module, attribute: str, param: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[attribute] = param
    else:  # modules that keep parameters elsewhere too, such as nn.LSTM in _flat_weights
        setattr(module, attribute, param)
