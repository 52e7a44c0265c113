"""full_params: a model's parameters as plain, full tensors for a while."""

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
from shardkit.ranks import Groups, all_gather_bytes, groups_of, raise_together, together
from shardkit.state.names import parameter_names, refuse_meta
from shardkit.state.routes import routes_of
from shardkit.state.transfer import Move, Want, gathered, transfer

Slots: TypeAlias = "dict[nn.Parameter, list[tuple[nn.Module, str]]]"  # where each parameter is registered


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

    As FSDP1's ``summon_full_params``, for any FSDP2 model or module that holds some. Names, ties, dtypes,
    ``requires_grad`` and attributes are those of the sharded ones, whatever the mixed precision policy says. The hooks
    of FSDP2 do nothing inside: modules, methods such as ``generate``, and parts that are not units run on the full
    parameters, without collectives, each rank by itself. Backward works too, on gradients that are not reduced and
    are gone afterwards. Hooks of others run: modules of ``parallelize_module`` still make DTensors of their inputs,
    which full parameters cannot take. Plain parameters stay what they are. Do not step an optimizer inside.

    Afterwards the same sharded parameters are in place, with or without an error, and resharded. What was written to
    the full ones is lost unless ``writeback``, which writes each rank's part into the live shards, in place; not after
    an error.

    **Collective**, on entry and, with both ``writeback`` and ``rank0_only``, on exit.

    Args:
        model: any module; its own mesh, ties and layout do not matter.
        writeback: keep what was written. With ``rank0_only`` rank 0's is scattered, which FSDP1 refused.
        rank0_only: give full parameters to the lowest rank that holds a part of the model alone; others keep shards.
        offload_to_cpu: full tensors on the CPU, wherever the shards are.
        with_grads: gather gradients too, where there are any, as ``grad`` of the full parameters; ``writeback``
            writes them back too. FSDP1 refused it with ``offload_to_cpu``.
        recurse: False is for the unit of ``model`` alone, if it is one: units inside of it stay sharded, and gather
            themselves when they are called.

    Raises:
        ShardkitError: on every rank: inside of a forward or backward, on meta, ranks that disagree about which
            parameters have gradients; on exit, a full parameter that has another shape now, or is gone.

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
    """As :func:`full_params`, gathered as ``want`` says. Collective.

    Args:
        root: the global rank that holds the full parameters unless all do; None is the lowest. Ranks that replicate may
            each name one of their own, as FSDP1 has one for each group that shards; then nothing can be written back.
    """
    groups = groups_of(model)
    with together(groups, call="full_params"):
        if _fsdp.is_under_way(model):
            rule = "Parameters cannot be exchanged while they are in use"
            raise ShardkitError(message("full_params", "called in a forward or backward", rule, "Call it outside"))
        own = None if recurse else set(_fsdp.own_parameters(model))
        names = {p: name for p, name in parameter_names(model).items() if _is_sharded(p) and (own is None or p in own)}
        refuse_meta((name, param) for param, name in names.items())
    routes = routes_of(names, root)
    grads = {param: _plain(param.grad) for param in names if with_grads and param.grad is not None}
    if with_grads:
        _check_same("\n".join(names[param] for param in grads), groups)
    shards: dict[str, Tensor] = {name: param for param, name in names.items()}
    shards |= {f"grad of {names[param]}": grad for param, grad in grads.items()}
    fulls = dict(gathered(shards.items(), routes, want))
    slots = _slots(model, names)
    problem: Exception | None = None
    found: dict[nn.Parameter, Tensor | None] = {}
    try:
        modules = list(model.modules()) if recurse else [model]
        with _fsdp.without_hooks(modules), _exchanged(slots, _parameters(names, fulls)):
            yield
            found = {param: getattr(*places[0], None) for param, places in slots.items() if fulls}
    except Exception as caught:
        problem = caught
    if writeback:
        problem = problem or _lost(names, found, grads)
        if not want.everywhere:
            _raise_own(problem, groups)
        elif problem is not None:
            raise problem
        moves = [_move(param, found.get(param)) for param in names]
        moves += [_move(grad, getattr(found.get(param), "grad", None)) for param, grad in grads.items()]
        transfer(moves, routes, "all" if want.everywhere else "rank0")
    if problem is not None:
        raise problem


def _is_sharded(param: object) -> bool:
    return isinstance(param, DTensor)


def _plain(grad: Tensor) -> Tensor:
    """A DTensor of torch's own class on the same memory; the drop-in's gradients answer for this rank's shard."""
    return with_local(grad, local_tensor(grad)) if isinstance(grad, DTensor) else grad


def _slots(model: nn.Module, names: Mapping[nn.Parameter, str]) -> Slots:
    """Where the parameters are registered, under all names, once all units are resharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    slots: Slots = {param: [] for param in names}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param in slots:
                slots[param].append((module, name))
    return slots


def _parameters(names: Mapping[nn.Parameter, str], fulls: Mapping[str, Tensor]) -> dict[nn.Parameter, nn.Parameter]:
    """The full parameter for each sharded one, on the ranks that have them."""
    made = {}
    for param, name in names.items() if fulls else ():
        made[param] = full = nn.Parameter(fulls[name], requires_grad=param.requires_grad)
        vars(full).update(vars(param))
        full.grad = fulls.get(f"grad of {name}")
    return made


@contextmanager
def _exchanged(slots: Slots, instead: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    try:
        for param, other in instead.items():
            _register(slots[param], other)
        yield
    finally:
        for param in instead:
            _register(slots[param], param)


def _register(places: list[tuple[nn.Module, str]], param: nn.Parameter) -> None:
    for module, name in places:
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[name] = param
        else:  # modules that keep more than the registry, such as nn.LSTM's flat weights
            setattr(module, name, param)


def _check_same(names: str, groups: Groups) -> None:
    """Raise on every rank if the ranks do not all have gradients of the same parameters."""
    own = names.encode()
    differ = any(other != own for group in groups for other in all_gather_bytes(own, group))
    rule = "with_grads gathers gradients from all ranks, so the same parameters must have some everywhere"
    problem = message("full_params", "ranks have gradients of different parameters", rule, "Leave with_grads out")
    raise_together(ShardkitError(problem) if differ else None, groups)


def _raise_own(problem: Exception | None, groups: Groups) -> None:
    """As ``raise_together``, with this rank's own error as it is."""
    try:
        raise_together(problem, groups)
    except ShardkitError:
        if problem is None:
            raise
        raise problem from None


def _lost(
    names: Mapping[nn.Parameter, str],
    found: Mapping[nn.Parameter, Tensor | None],
    grads: Mapping[nn.Parameter, Tensor],
) -> ShardkitError | None:
    shapes = {param: tuple(getattr(value, "shape", ())) for param, value in found.items()}
    lost = [f"{names[param]} {shape}" for param, shape in shapes.items() if shape != tuple(param.shape)]
    of_grads = {p: getattr(getattr(found[p], "grad", None), "shape", None) for p in grads if p in found}
    lost += [f"grad of {names[param]}" for param, shape in of_grads.items() if shape != param.shape]
    rule = "What is written back has the shape of the sharded parameter"
    text = message(listing(lost), "has another shape, or is gone", rule, "Resize before sharding")
    return ShardkitError(text) if lost else None


def _move(target: Tensor, full: Tensor | None) -> Move:
    return Move(target, target.dtype, None if full is None else full.detach().to(target.dtype))
