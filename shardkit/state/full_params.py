"""full_params: a model's parameters as plain, full tensors for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit import _fsdp
from shardkit._torch import local_tensor, with_local
from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import Groups, all_gather_bytes, groups_of, raise_together, together
from shardkit.state.gather import Want, gathered
from shardkit.state.load import transfer
from shardkit.state.model import refuse_meta
from shardkit.state.names import parameter_names
from shardkit.state.routes import Lead, find_lead
from shardkit.state.scatter import Move

Slots: TypeAlias = "dict[nn.Parameter, list[tuple[nn.Module, str]]]"  # where each parameter is registered


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
    """In this context the model's sharded parameters are plain ``nn.Parameter``\\ s of the full tensors.

    As FSDP1's ``summon_full_params``, for any FSDP2 model or module that holds some. Names, ties, ``requires_grad`` and
    attributes are those of the sharded ones, and the dtype is theirs too, whatever the mixed precision policy says.
    The hooks of FSDP2 do nothing inside: modules, methods such as ``generate``, and parts that are no unit run on the
    full parameters, without collectives, each rank by itself. Backward works too, on gradients that are not reduced and
    are gone afterwards. Hooks of others run: modules of ``parallelize_module`` still make DTensors of their inputs,
    which full parameters cannot take. Plain parameters stay what they are, and so do those of the optimizer, which has
    no business inside.

    Afterwards the same sharded parameters are in place, with or without an error, resharded if a forward had left
    them gathered. What was written to the full ones is lost unless ``writeback``, which writes each rank's part into
    the live shards, in place; not after an error.

    **Collective**, on entry and, with both ``writeback`` and ``rank0_only``, on exit. Every rank holds the full
    parameters, or with ``rank0_only`` the lowest rank alone; other ranks keep their shards.

    Args:
        model: any module; its own mesh, ties and layout do not matter.
        writeback: keep what was written. With ``rank0_only`` rank 0's is scattered, which FSDP1 refused.
        rank0_only: give full parameters to the lowest rank that holds a part of the model alone.
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
    with full_params_from(
        model,
        None,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
        recurse=recurse,
    ):
        yield


@contextmanager
def full_params_from(
    model: nn.Module,
    rank: int | None,
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
) -> Iterator[None]:
    """As :func:`full_params`, with a lead that the caller chooses. Collective.

    Args:
        rank: the global rank that holds the full parameters with ``rank0_only``; None is the lowest. Ranks that
            replicate may each name one of their own, as FSDP1 has one for each group that shards; then nothing can be
            written back from them.
    """
    groups = groups_of(model)
    with together(groups, call="full_params"):
        if _fsdp.is_under_way(model):
            rule = "Parameters cannot be exchanged while they are in use"
            raise ShardkitError(message("full_params", "called in a forward or backward", rule, "Call it outside"))
        modules = list(model.modules()) if recurse else [model]
        own = None if recurse else set(_fsdp.own_parameters(model))
        all_names = parameter_names(model)
        names = {p: all_names[p] for p in all_names if _is_sharded(p) and (own is None or p in own)}
        refuse_meta((name, param) for param, name in names.items())
    lead = find_lead(names, rank)
    want = Want(not rank0_only, torch.device("cpu") if offload_to_cpu else None)
    graded = {name: _plain(param.grad) for param, name in names.items() if with_grads and param.grad is not None}
    _check_same(graded, groups)
    fulls = dict(gathered([(name, param) for param, name in names.items()], lead, want))
    grads = dict(gathered(list(graded.items()), lead, want))

    slots = _slots(model, names)
    problem: Exception | None = None
    found: dict[str, Tensor | None] = {}
    try:
        with _fsdp.without_hooks(modules), _exchanged(slots, _parameters(names, fulls, grads)):
            yield
            found = {names[param]: getattr(*places[0], None) for param, places in slots.items()}
    except Exception as caught:
        problem = caught
    if writeback:
        _finish(names, graded, found if fulls else {}, problem, rank0_only, groups, lead)
    if problem is not None:
        raise problem


def _plain(grad: Tensor) -> Tensor:
    """A DTensor of torch's own class on the same memory; the drop-in's gradients answer for this rank's shard."""
    return with_local(grad, local_tensor(grad)) if isinstance(grad, DTensor) else grad


def _is_sharded(param: object) -> bool:
    return isinstance(param, DTensor)


def _slots(model: nn.Module, names: Mapping[nn.Parameter, str]) -> Slots:
    """Where the parameters are registered, under all names, once no stand-in is any more."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    slots: Slots = {param: [] for param in names}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param in slots:
                slots[param].append((module, name))
    return slots


def _parameters(
    names: Mapping[nn.Parameter, str], fulls: Mapping[str, Tensor], grads: Mapping[str, Tensor]
) -> dict[nn.Parameter, nn.Parameter]:
    """The full parameter for each sharded one, on the ranks that have them."""
    made = {}
    for param, name in names.items():
        if name in fulls:
            made[param] = full = nn.Parameter(fulls[name], requires_grad=param.requires_grad)
            vars(full).update(vars(param))
            full.grad = grads.get(name)
    return made


@contextmanager
def _exchanged(slots: Slots, instead: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    for param, other in instead.items():
        _register(slots[param], other)
    try:
        yield
    finally:
        for param in instead:
            _register(slots[param], param)


def _register(places: Iterable[tuple[nn.Module, str]], param: nn.Parameter) -> None:
    for module, name in places:
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[name] = param
        else:  # modules that keep more than the registry, such as nn.LSTM's flat weights
            setattr(module, name, param)


def _check_same(names: Iterable[str], groups: Groups) -> None:
    """Raise on every rank if the ranks do not all have gradients of the same parameters."""
    own = "\n".join(names).encode()
    differ = any(other != own for group in groups for other in all_gather_bytes(own, group))
    rule = "with_grads gathers gradients from all ranks, so the same parameters must have some everywhere"
    problem = message("full_params", "ranks have gradients of different parameters", rule, "Leave with_grads out")
    raise_together(ShardkitError(problem) if differ else None, groups)


def _finish(
    names: Mapping[nn.Parameter, str],
    graded: Mapping[str, Tensor],
    found: Mapping[str, Tensor | None],
    problem: Exception | None,
    rank0_only: bool,
    groups: Groups,
    lead: Lead,
) -> None:
    """Write full parameters, and gradients, into the shards; or raise what any rank that has some ran into."""
    if problem is None:
        problem = _lost(names, found)
    if rank0_only:
        _raise_first(problem, groups)
    elif problem is not None:
        raise problem
    moves = [_move(param, found.get(name)) for param, name in names.items()]
    for name, grad in graded.items():
        full = found.get(name)
        moves.append(_move(grad, None if full is None else full.grad))
    transfer(iter(moves), lead, "rank0" if rank0_only else "all")


def _raise_first(problem: Exception | None, groups: Groups) -> None:
    """As ``raise_together``, with this rank's own error as it is."""
    try:
        raise_together(problem, groups)
    except ShardkitError:
        if problem is not None:
            raise problem from None
        raise


def _lost(names: Mapping[nn.Parameter, str], found: Mapping[str, Tensor | None]) -> ShardkitError | None:
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in found.items()}
    lost = [f"{name} {shapes[name]}" for param, name in names.items() if found and shapes[name] != tuple(param.shape)]
    if not lost:
        return None
    rule = "What is written back has the shape of the sharded parameter"
    return ShardkitError(message(listing(lost), "has another shape, or is gone", rule, "Resize before sharding"))


def _move(target: Tensor, full: Tensor | None) -> Move:
    return Move(target, target.dtype, None if full is None else full.detach().to(target.dtype))
