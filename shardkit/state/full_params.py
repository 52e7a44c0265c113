"""full_params: replace a model's sharded parameters by plain, full ones in a context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit import _fsdp
from shardkit._torch import local_tensor, with_local
from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import agree, groups_of, raise_together, together
from shardkit.state.names import parameter_names, refuse_meta
from shardkit.state.routes import routes_of
from shardkit.state.transfer import Move, Want, gathered, transfer

Slots: TypeAlias = "dict[nn.Parameter, list[tuple[nn.Module, str]]]"  # the modules and names of each parameter


def full_params(
    model: nn.Module,
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
) -> AbstractContextManager[None]:
    """In this context the model's sharded parameters are plain ``nn.Parameter``\\ s of the full tensors.

    Like FSDP1's ``summon_full_params``, for any module with FSDP2 units. Names, ties, dtypes, ``requires_grad`` and
    attributes are those of the sharded parameters, independent of the mixed precision policy. FSDP2's hooks do nothing
    inside: modules, methods such as ``generate``, and parts that are not units run on the full parameters, without
    collectives, each rank by itself. Backward works, but its gradients are not reduced, and are dropped on exit. Other
    hooks run: modules of ``parallelize_module`` still make DTensors of their inputs, which do not mix with full
    parameters. Plain parameters are unchanged. Do not step an optimizer inside.

    On exit, with or without an error, the same sharded parameters are registered again. Changes of the full ones are
    lost unless ``writeback=True``, which copies each rank's part into its shards, in place, unless there was an error.

    **Collective**, on entry and, with both ``writeback`` and ``rank0_only``, on exit.

    Args:
        model: any module, on any mesh, with any ties.
        writeback: write changes into the shards. With ``rank0_only`` rank 0's are scattered, which FSDP1 refused.
        rank0_only: give full parameters only to the lowest rank that holds a part of the model; others keep shards.
        offload_to_cpu: put full tensors on the CPU, wherever the shards are.
        with_grads: gather existing gradients too, as ``grad`` of the full parameters; ``writeback`` writes them back
            too. FSDP1 refused it with ``offload_to_cpu``.
        recurse: False gathers only the parameters of ``model``'s own unit: units inside of it stay sharded, and gather
            themselves when they are called.

    Raises:
        ShardkitError: on every rank: inside of a forward or backward; on meta; if ranks pass different arguments or,
            with ``with_grads``, differ in which parameters have gradients; on exit, if a full parameter has another
            shape, or is gone.

    Example:
        >>> with full_params(model, writeback=True):
        ...     model.embed.weight[0].data.zero_()
    """
    want = Want(not rank0_only, torch.device("cpu") if offload_to_cpu else None)
    return full_params_from(model, None, want, writeback=writeback, with_grads=with_grads, recurse=recurse)


@contextmanager
def full_params_from(
    model: nn.Module,
    root: int | None,
    want: Want,
    *,
    writeback: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
) -> Iterator[None]:
    """Do what :func:`full_params` does, gathered as ``want`` says. Collective.

    Args:
        root: the global rank that holds the full parameters unless all do; None is the lowest. Each replica may name a
            rank of its own, as FSDP1 has one for each group that shards; then nothing can be written back.
    """
    groups = groups_of(model)
    with together(groups, call="full_params") as poll:
        if _fsdp.is_under_way(model):
            rule = "Parameters cannot be replaced while they are in use"
            fix = "Call it before the forward or after backward"
            raise ShardkitError(message("full_params", "called in a forward or backward", rule, fix))
        own = None if recurse else set(_fsdp.own_parameters(model))
        names = {p: name for p, name in parameter_names(model).items() if own is None or p in own}
        names = {param: name for param, name in names.items() if _is_sharded(param)}
        refuse_meta((name, param) for param, name in names.items())
        poll.same = {"rank0_only": not want.everywhere, "writeback": writeback}
        poll.same |= {"with_grads": with_grads, "recurse": recurse}
    routes = routes_of(names, root)
    grads = {param: _plain(param.grad) for param in names if with_grads and param.grad is not None}
    if with_grads:
        fix = "Pass with_grads=False, or run the same backward on every rank before full_params(..., with_grads=True)"
        agree({"which parameters have gradients": [names[param] for param in grads]}, groups, "full_params", fix=fix)
    shards: dict[str, Tensor] = {name: param for param, name in names.items()}
    shards |= {f"grad of {names[param]}": grad for param, grad in grads.items()}
    fulls = dict(gathered(shards.items(), routes, want))
    slots = _slots(model, names)
    problem: Exception | None = None
    found: dict[nn.Parameter, Tensor | None] = {}
    try:
        modules = list(model.modules()) if recurse else [model]
        with _fsdp.without_hooks(modules), _registered(slots, _full_parameters(names, fulls)):
            yield
            found = {param: getattr(*places[0], None) for param, places in slots.items() if fulls}
    except Exception as caught:
        problem = caught
    if writeback:
        problem = problem or _lost(names, found, grads)
        try:
            raise_together(problem, [] if want.everywhere else groups)
        except ShardkitError as error:
            raise problem or error from None
        moves = [_move(param, found.get(param)) for param in names]
        moves += [_move(grad, getattr(found.get(param), "grad", None)) for param, grad in grads.items()]
        transfer(moves, routes, "all" if want.everywhere else "rank0")
    elif problem is not None:
        raise problem


def _is_sharded(param: object) -> bool:  # not narrowed, or mypy takes the keys for DTensors
    return isinstance(param, DTensor)


def _plain(grad: Tensor) -> Tensor:
    """Return a DTensor of torch's own class on the same memory; in the drop-in ``shape`` is that of the shard."""
    return with_local(grad, local_tensor(grad)) if isinstance(grad, DTensor) else grad


def _slots(model: nn.Module, names: Mapping[nn.Parameter, str]) -> Slots:
    """Reshard all units; return where each parameter is registered, under all its names."""
    slots: Slots = {param: [] for param in names}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for module in model.modules():
        for name, param in module._parameters.items():
            if param in slots:
                slots[param].append((module, name))
    return slots


def _full_parameters(
    names: Mapping[nn.Parameter, str], fulls: Mapping[str, Tensor]
) -> dict[nn.Parameter, nn.Parameter]:
    """Make the full parameter for each sharded one, on the ranks that have full tensors."""
    made = {}
    for param, name in names.items() if fulls else ():
        made[param] = full = nn.Parameter(fulls[name], requires_grad=param.requires_grad)
        vars(full).update(vars(param))
        full.grad = fulls.get(f"grad of {name}")
    return made


@contextmanager
def _registered(slots: Slots, fulls: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """In this context full parameters are registered in the place of sharded ones."""

    def register(param: nn.Parameter, instead: nn.Parameter) -> None:
        for module, name in slots[param]:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = instead
            else:  # modules that keep parameters elsewhere too, such as nn.LSTM in _flat_weights
                setattr(module, name, instead)

    try:
        for param, full in fulls.items():
            register(param, full)
        yield
    finally:
        for param in fulls:
            register(param, param)


def _lost(
    names: Mapping[nn.Parameter, str],
    found: Mapping[nn.Parameter, Tensor | None],
    grads: Mapping[nn.Parameter, Tensor],
) -> ShardkitError | None:
    """Return an error that names full parameters and gradients that cannot be written back, or None."""
    lost = []
    for param, full in found.items():
        if (shape := tuple(getattr(full, "shape", ()))) != tuple(param.shape):
            lost.append(f"{names[param]} {shape}")
        if param in grads and getattr(getattr(full, "grad", None), "shape", None) != param.shape:
            lost.append(f"grad of {names[param]}")
    rule = "A tensor that is written back must have the shape of the sharded parameter"
    text = message(listing(lost), "has another shape, or is gone", rule, "Resize parameters before sharding")
    return ShardkitError(text) if lost else None


def _move(target: Tensor, full: Tensor | None) -> Move:
    return Move(target, target.dtype, None if full is None else full.detach().to(target.dtype))
