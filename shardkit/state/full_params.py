"""full_params: replace a model's sharded parameters by plain, full ones in a context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit import _fsdp
from shardkit._fsdp.undone import without_hooks
from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import groups_of, raise_together, together
from shardkit.state.boxes import Move, cut_all, gather, model_group, scatter
from shardkit.state.names import parameter_names, refuse_meta


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
    device = torch.device("cpu") if offload_to_cpu else None
    options: dict[str, Any] = {"writeback": writeback, "with_grads": with_grads, "recurse": recurse}
    return gathered_params(model, everywhere=not rank0_only, device=device, **options)


@contextmanager
def gathered_params(
    model: nn.Module,
    *,
    root: int | None = None,
    everywhere: bool = True,
    device: torch.device | None = None,
    writeback: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
) -> Iterator[None]:
    """Do what :func:`full_params` does, on the device or where tensors are gathered. Collective.

    Args:
        root: the global rank that holds the full parameters unless all do; None is the lowest. Each replica may name a
            rank of its own, as FSDP1 has one for each group that shards; then nothing can be written back.
    """
    groups = groups_of(model)
    with together(groups, call="full_params") as poll:
        if _fsdp.is_under_way(model):
            rule, fix = "Parameters cannot be replaced while in use", "Call it before the forward or after backward"
            raise ShardkitError(message("full_params", "was called in a forward or backward", rule, fix))
        own = None if recurse else set(_fsdp.own_parameters(model))
        names = {p: name for p, name in parameter_names(model).items() if own is None or p in own}
        names = {param: name for param, name in names.items() if hasattr(param, "device_mesh")}
        refuse_meta((name, param) for param, name in names.items())
        grads = {param: param.grad for param in names if with_grads and param.grad is not None}
        poll.same = {"rank0_only": not everywhere, "writeback": writeback, "with_grads": with_grads, "recurse": recurse}
        poll.same |= {"which parameters have gradients": [names[param] for param in grads]}
    ranks = model_group(names, root)
    shards: dict[str, Tensor] = {name: param for param, name in names.items()}
    shards |= {f"grad of {names[param]}": grad for param, grad in grads.items()}
    fulls = dict(gather(shards.items(), ranks, everywhere=everywhere, device=device))
    problem: Exception | None = None
    found: dict[nn.Parameter, Tensor | None] = {}
    try:
        with (
            without_hooks(list(model.modules()) if recurse else [model]),
            _replaced(model, names, fulls) as places,
        ):
            yield
            found = {param: getattr(module, name, None) for param, (module, name) in places.items()}
    except Exception as caught:
        if not writeback:
            raise
        problem = caught
    if not writeback:
        return
    try:
        raise_together(problem or _lost(names, found, grads), [] if everywhere else groups)
    except ShardkitError as error:
        raise problem or error from None
    pairs: list[tuple[Tensor, Tensor | None]] = [(param, found.get(param)) for param in names]
    pairs += [(grad, getattr(found.get(param), "grad", None)) for param, grad in grads.items()]
    moves = [Move(t, None if full is None else full.detach().to(t.dtype), t.dtype) for t, full in pairs]
    cut_all(moves) if everywhere else scatter(moves, ranks)


@contextmanager
def _replaced(
    model: nn.Module, names: Mapping[nn.Parameter, str], fulls: Mapping[str, Tensor]
) -> Iterator[dict[nn.Parameter, tuple[nn.Module, str]]]:
    """Register full parameters in the place of sharded ones, on ranks that have them; yield one place of each."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    made: dict[nn.Parameter, nn.Parameter] = {}
    for param, name in names.items() if fulls else ():
        made[param] = full = nn.Parameter(fulls[name], requires_grad=param.requires_grad)
        vars(full).update(vars(param))
        full.grad = fulls.get(f"grad of {name}")
    slots = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p in made]
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


# Until nobody imports it.


def full_params_from(model: nn.Module, root: int | None, want: Any, **options: bool) -> AbstractContextManager[None]:
    """Do what :func:`gathered_params` does."""
    return gathered_params(model, root=root, everywhere=want.everywhere, device=want.device, **options)
