"""load_full_state_dict: plain, full tensors into a model, sharded or not."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import groups_of, together
from shardkit.state.names import ModelState, clean_name, is_extra, refuse_meta
from shardkit.state.place import Room, live_state
from shardkit.state.plan import (
    IncompatibleKeys,
    LoadPlan,
    Request,
    Spec,
    check_ties,
    plan_load,
    same_values,
    unless_complex,
)
from shardkit.state.routes import routes_of
from shardkit.state.transfer import Move, Source, check_src, share, transfer, world_groups


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    src: Source = "rank0",
    strict: bool = True,
    assign: bool = False,
) -> IncompatibleKeys:
    """Load plain, full tensors by FQN, such as :func:`full_state_dict` gives, into a model of any layout.

    In place: parameters and buffers stay the same objects, so optimizers, ties and attributes still point at them.
    Values are converted to the model's dtypes. The dict is left as it was, and shares no memory with the model
    afterwards. Of tied tensors one name is enough; values under several must be equal. Names in the dict may have the
    wrappers ``_orig_mod`` and ``_checkpoint_wrapped_module``, or not. Hooks of ``load_state_dict`` do not run.

    A model on meta is materialised: what the dict has gets memory where the mesh wants it (the CPU where offloaded),
    and other meta tensors, such as non-persistent buffers, what the construction computes, as by ``materialize``.

    **Collective**: every rank calls it. ``src="rank0"`` sends each rank its own shard alone, straight from the dict
    and into place where dtypes agree, and broadcasts what ranks hold whole; with ``src="all"`` ranks exchange only
    success or failure. Besides the shards, the most that is held is one bucket of 64 MiB or one tensor.

    Args:
        model: any module, with values or on meta, sharded by anyone or not at all.
        state_dict: full tensors on any device. With ``src="rank0"`` it is read on the lowest rank that holds a part
            of the model alone; elsewhere it may be ``{}``.
        src: ``"rank0"``, or ``"all"`` where every rank has the same dict.
        strict: raise for missing and unexpected names, and for different values of one tied tensor. False leaves such
            names alone and returns them, and takes the first of the values with a warning.
        assign: take over the dict's dtypes, in new memory where they differ from the model's, which belongs before
            the first forward. It never shares the dict's memory, as torch's ``assign`` does.

    Returns:
        ``missing_keys`` and ``unexpected_keys``; both empty when strict.

    Raises:
        ShardkitError: on every rank, with nothing changed: names that are missing or unexpected, shapes that differ,
            values that are not plain tensors with values (all listed together); a hook on ``state_dict()`` replaces
            the model's tensors; meta tensors that neither the dict nor the construction gives a value.

    Example:
        >>> state = torch.load("model.pt") if rank == 0 else {}
        >>> load_full_state_dict(model, state)
    """
    groups = groups_of(model) or world_groups(src)
    request = Request(
        "state_dict",
        strict,
        clean_name,
        unless_complex,
        "strict=False leaves names that do not match alone",
        ShardkitError,
    )

    def prepared(offered: Mapping[str, Any]) -> tuple[LoadPlan, Room]:
        plan = plan_load({name: state.tensors.get(name, None) for name in state.order}, offered, request)
        if given:
            check_ties(plan, partial(_are_equal, given, state), request)
        names = [name for name in plan.copies if name in state.tensors]
        dtypes = {n: offered[plan.copies[n]].dtype if assign else state.tensors[n].dtype for n in names}
        room = Room(model, state.tensors, dtypes)
        room.compute()
        return plan, room

    with together(groups, call="load_full_state_dict"):
        check_src(src)
        state = live_state(model)
        routes = routes_of(state.tensors.values())
        given = _checked(state_dict) if src == "all" or routes.is_root else {}
        offered = {
            name: Spec(value.dtype, value.shape) if isinstance(value, Tensor) and not is_extra(name) else value
            for name, value in given.items()
        }
        packed = pickle.dumps(offered) if src == "rank0" else b""
        ready = prepared(offered) if src == "all" else None
    if ready is None:
        offered = pickle.loads(share(packed, routes))
        with together(groups):
            ready = prepared(offered)
    plan, room = ready
    moves = [
        Move(room.of(state.tensors[name]), offered[source].dtype, given.get(source))
        for name, source in plan.copies.items()
        if name in state.tensors
    ]
    transfer(moves, routes, src)
    room.install()
    _set_extras(model, {name: offered[source] for name, source in plan.copies.items() if name in state.others})
    return plan.keys


def _are_equal(given: Mapping[str, Any], state: ModelState, name: str, one: str, other: str) -> bool:
    values = [given[each].to(state.tensors[name].dtype) for each in (one, other)]
    return values[0] is values[1] or same_values(*values)


def _checked(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The dict, which holds what can be loaded."""
    if not isinstance(state_dict, Mapping):
        problem = f"is a {type(state_dict).__name__}"
        raise ShardkitError(message("state_dict", problem, "It maps names to tensors", "Pass a state dict"))
    if sharded := [name for name, value in state_dict.items() if isinstance(value, DTensor)]:
        rule = "load_full_state_dict takes full, plain tensors"
        fix = "Pass full_state_dict(model), or load sharded tensors with model.load_state_dict"
        raise ShardkitError(message("state_dict", f"{listing(sharded)} is a DTensor", rule, fix))
    refuse_meta((name, value) for name, value in state_dict.items() if isinstance(value, Tensor))
    return state_dict


def _set_extras(model: nn.Module, extras: Mapping[str, object]) -> None:
    modules = {clean_name(name): module for name, module in model.named_modules()}
    for name, value in extras.items():
        setter: Callable[[object], None] = modules[name.rpartition(".")[0]].set_extra_state
        setter(value)
