"""full_params: replace a model's sharded parameters by plain, full ones in a context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit import _fsdp
from shardkit._fsdp.states import without_hooks
from shardkit.boxes import EACH_ALONE, Move, gather, model_group, refuse_quantized, scatter
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import groups_of, together
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
    """In this context the model's sharded parameters are plain ``nn.Parameter``\\ s of the full
    tensors.

    Like FSDP1's ``summon_full_params``, for any module with FSDP2 units. Names, ties, dtypes,
    ``requires_grad`` and attributes are those of the sharded parameters. FSDP2's hooks do nothing
    inside: modules, methods such as ``generate``, and parts that are not units run without
    collectives; gradients are not reduced, and dropped on exit. Modules of ``parallelize_module``
    still make DTensors, which do not mix with full parameters. Do not step an optimizer inside. On
    exit the same sharded parameters are registered again. **Collective**, on entry and, with both
    ``writeback`` and ``rank0_only``, on exit.

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
    with together(groups, call="full_params") as poll:
        names, grads = _gathered(model, recurse, with_grads)
        poll.same = {
            "rank0_only": rank0_only,
            "writeback": writeback,
            "with_grads": with_grads,
            "recurse": recurse,
        }
        poll.same |= {"which parameters have gradients": [names[param] for param in grads]}
    ranks, device = model_group(names), torch.device("cpu") if offload_to_cpu else None
    shards: dict[str, Tensor] = {name: param for param, name in names.items()}
    shards |= {f"grad of {names[param]}": grad for param, grad in grads.items()}
    fulls = dict(gather(shards.items(), ranks, everywhere=not rank0_only, device=device))
    moves: list[Move] = []
    with together(groups if writeback and rank0_only else []):
        with (
            without_hooks([*model.modules()] if recurse else [model]),
            _replaced(model, names, fulls) as places,
        ):
            yield
            found = {
                names[param]: getattr(module, name, None)
                for param, (module, name) in places.items()
            }
        if writeback:
            found |= {
                f"grad of {names[p]}": getattr(found[names[p]], "grad", None)
                for p in grads
                if found
            }
            moves = _moves(shards, found)
    scatter(moves, ranks if rank0_only else EACH_ALONE)


def _gathered(
    model: nn.Module, recurse: bool, with_grads: bool
) -> tuple[dict[nn.Parameter, str], dict[nn.Parameter, Tensor]]:
    """Return the names and the gradients of the parameters to gather; raise if they cannot be.
    Local.
    """
    if _fsdp.is_under_way(model):
        raise ShardkitError(
            "full_params was called in a forward or backward. Parameters cannot be replaced while "
            "in use. Call it before the forward or after backward."
        )
    own = None if recurse else set(_fsdp.own_parameters(model))
    names: dict[nn.Parameter, str] = {}
    for param, name in parameter_names(model).items():
        if isinstance(param, DTensor) and (own is None or param in own):
            names[param] = name
    check_awake(names)
    refuse_meta((name, param) for param, name in names.items())
    refuse_quantized((name, param) for param, name in names.items())
    return names, {param: param.grad for param in names if with_grads and param.grad is not None}


def _moves(shards: Mapping[str, Tensor], found: Mapping[str, Tensor | None]) -> list[Move]:
    """Return what is written back, given the full tensors of this rank, if it has any. Local."""
    if lost := [
        name for name, full in found.items() if getattr(full, "shape", None) != shards[name].shape
    ]:
        raise ShardkitError(
            f"{listing(lost)} has another shape, or is gone. A tensor that is written back must "
            "have the shape of the sharded parameter. Resize parameters before sharding."
        )
    fulls = {
        name: full.detach().to(shards[name].dtype)
        for name, full in found.items()
        if full is not None
    }
    return [Move(shard, fulls.get(name), shard.dtype) for name, shard in shards.items()]


@contextmanager
def _replaced(
    model: nn.Module, names: Mapping[nn.Parameter, str], fulls: Mapping[str, Tensor]
) -> Iterator[dict[nn.Parameter, tuple[nn.Module, str]]]:
    """Register full parameters in the place of sharded ones, on ranks that have them; yield one
    place of each.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    made: dict[nn.Parameter, nn.Parameter] = {}
    for param, name in names.items() if fulls else ():
        made[param] = full = nn.Parameter(fulls[name], requires_grad=param.requires_grad)
        vars(full).update(vars(param))
        full.grad = fulls.get(f"grad of {name}")
    slots = [
        (m, name, p) for m in model.modules() for name, p in m._parameters.items() if p in made
    ]
    try:
        for module, name, param in slots:
            _register(module, name, made[param])
        yield {param: (module, name) for module, name, param in reversed(slots)}
    finally:
        for module, name, param in slots:
            _register(module, name, param)


def _register(module: nn.Module, name: str, param: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = param
    else:  # modules that keep parameters elsewhere too, such as nn.LSTM in _flat_weights
        setattr(module, name, param)
