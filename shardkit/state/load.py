"""load_full_state_dict: plain, full tensors into a model, sharded or not."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import groups_of, together
from shardkit.state.names import clean_name, is_extra, refuse_meta
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

    In place: parameters and buffers stay the same objects, so optimizers, ties and attributes stay valid. Values are
    converted to the model's dtypes. The dict is not changed, and shares no memory with the model. One name of tied
    tensors is enough; the values of several must be equal. Names in the dict may have the wrappers ``_orig_mod`` and
    ``_checkpoint_wrapped_module``, or not. Hooks of ``load_state_dict`` do not run.

    A model on meta is materialized: tensors in the dict get memory on the mesh's device (the CPU if offloaded), and
    other meta tensors, such as non-persistent buffers, the values of their construction, as by ``materialize``.

    **Collective**: every rank calls it. ``src="rank0"`` sends each rank only its shards, straight from the dict and
    into place if dtypes are equal, and broadcasts tensors that are not sharded; with ``src="all"`` ranks exchange only
    success or failure. Besides the shards, at most one bucket of 64 MiB or one tensor is held.

    Args:
        model: any module, with values or on meta, sharded or not.
        state_dict: full tensors on any device. With ``src="rank0"`` it is read only on the lowest rank that holds a
            part of the model; elsewhere it may be ``{}``.
        src: ``"rank0"``, or ``"all"`` if every rank has the same dict.
        strict: raise for missing and unexpected names, and for different values of one tied tensor. False ignores such
            names and returns them, and takes the first of the values with a warning.
        assign: take over the dict's dtypes, in new memory where they differ from the model's. Use it before the first
            forward. Unlike torch's ``assign`` it never shares the dict's memory.

    Returns:
        ``missing_keys`` and ``unexpected_keys``; both empty when strict.

    Raises:
        ShardkitError: on every rank, with nothing changed: missing or unexpected names, different shapes, values that
            are not plain tensors with values (all listed together); a hook on ``state_dict()`` that replaces the
            model's tensors; meta tensors that have a value neither in the dict nor from the construction.

    Example:
        >>> state = torch.load("model.pt") if rank == 0 else {}
        >>> load_full_state_dict(model, state)
    """
    groups = groups_of(model) or world_groups(src)
    fix = "Pass strict=False to ignore names that only one side has"
    request = Request("state_dict", strict, clean_name, unless_complex, fix, ShardkitError)

    def prepared(offered: Mapping[str, Any]) -> tuple[LoadPlan, Room]:
        plan = plan_load({name: state.tensors.get(name) for name in state.order}, offered, request)
        tensors = {name: source for name, source in plan.copies.items() if name in state.tensors}
        dtypes = {n: offered[source].dtype if assign else state.tensors[n].dtype for n, source in tensors.items()}

        def are_equal(name: str, one: str, other: str) -> bool:
            first, second = given[one], given[other]
            device, dtype = first.device, dtypes[name]
            return first is second or same_values(first.to(dtype), second.to(device, dtype))

        if given:
            check_ties(plan, are_equal, request)
        room = Room(model, state.tensors, dtypes)
        room.compute()
        return plan, room

    with together(groups, call="load_full_state_dict") as poll:
        poll.same = {"src": src, "strict": strict, "assign": assign}
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
    modules: dict[str, Any] = {clean_name(n): module for n, module in model.named_modules(remove_duplicate=False)}
    for name, source in plan.copies.items():
        if name in state.others:
            modules[name.rpartition(".")[0]].set_extra_state(offered[source])
    return plan.keys


def _checked(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the dict; raise unless it holds full tensors with values."""
    if not isinstance(state_dict, Mapping):
        problem = f"is a {type(state_dict).__name__}"
        raise ShardkitError(message("state_dict", problem, "It maps names to tensors", "Pass a state dict"))
    if sharded := [name for name, value in state_dict.items() if isinstance(value, DTensor)]:
        rule = "load_full_state_dict takes full, plain tensors"
        fix = "Pass full_state_dict(model), or load sharded tensors with model.load_state_dict"
        raise ShardkitError(message("state_dict", f"{listing(sharded)} is a DTensor", rule, fix))
    refuse_meta((name, value) for name, value in state_dict.items() if isinstance(value, Tensor))
    return state_dict
