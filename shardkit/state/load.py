"""load_full_state_dict: plain, full tensors into a model, sharded or not."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import Groups, groups_of, together
from shardkit.state.boxes import Move, cut_all, model_group, scatter, share
from shardkit.state.names import clean_name, is_extra, refuse_meta
from shardkit.state.place import Room, live_state
from shardkit.state.plan import IncompatibleKeys, Request, Spec, check_ties, plan_load, same_values

Source = Literal["rank0", "all"]


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
    ``_checkpoint_wrapped_module``. Hooks of ``load_state_dict`` do not run.

    A model on meta is materialized: tensors in the dict get memory on the mesh's device (the CPU if offloaded), and
    others, such as non-persistent buffers, the values of their construction.

    **Collective**: every rank calls it. With ``src="rank0"`` that rank sends each other rank its part once, and full
    tensors where they are not sharded; of replicas one is sent its parts, and broadcasts them. With ``src="all"`` ranks
    exchange only success or failure. Besides the shards, at most one bucket of 64 MiB or one tensor is held.

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
    groups = load_groups(model, src)
    fix = "Pass strict=False to ignore names that only one side has"
    request = Request("state_dict", strict, clean_name, _converts, fix, ShardkitError)
    with together(groups, call="load_full_state_dict") as poll:
        poll.same = {"src": src, "strict": strict, "assign": assign}
        state = live_state(model)
        ranks = model_group(state.tensors.values())
        given = _checked(state_dict) if src == "all" or ranks.is_root else {}
        offered = {
            name: Spec(value.dtype, value.shape) if isinstance(value, Tensor) and not is_extra(name) else value
            for name, value in given.items()
        }
        packed = pickle.dumps(offered) if src == "rank0" else b""
    if src == "rank0":
        offered = pickle.loads(share(packed, ranks))
    with together(groups):
        plan = plan_load({name: state.tensors.get(name) for name in state.order}, offered, request)
        sources = {name: source for name, source in plan.copies.items() if name in state.tensors}
        dtypes = {name: offered[s].dtype if assign else state.tensors[name].dtype for name, s in sources.items()}
        if given:
            check_ties(plan, lambda name, a, b: _are_equal(given[a], given[b], dtypes[name]), request)
        room = Room(model, state.tensors, dtypes)
        room.compute()
    moves = [Move(room.of(state.tensors[n]), given.get(s), offered[s].dtype) for n, s in sources.items()]
    cut_all(moves) if src == "all" else scatter(moves, ranks)
    room.install()
    modules: dict[str, Any] = {clean_name(name): each for name, each in model.named_modules(remove_duplicate=False)}
    for name in (name for name in plan.copies if name in state.others):
        modules[name.rpartition(".")[0]].set_extra_state(offered[plan.copies[name]])
    return plan.keys


def load_groups(model: nn.Module, src: Source) -> Groups:
    """Return the groups that load into a model: of its meshes, or all ranks if one has the tensors. Local."""
    if src not in ("rank0", "all"):
        fix = 'Pass src="all" if every rank has the dict'
        raise ShardkitError(message("src", f'must be "rank0" or "all", got {src!r}', "", fix))
    several = dist.is_initialized() and dist.get_world_size() > 1
    return groups_of(model) or [None] * (src == "rank0" and several)


def _converts(have: torch.dtype, want: torch.dtype) -> bool:
    return want.is_complex or not have.is_complex  # whose imaginary parts ``copy_`` would drop


def _are_equal(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    return one is other or same_values(one.to(dtype), other.to(one.device, dtype))


def _checked(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the dict; raise unless it holds full tensors with values."""
    if not isinstance(state_dict, Mapping):
        problem = f"must be a dict of tensors by name, got {type(state_dict).__name__}"
        raise ShardkitError(message("state_dict", problem, "", "Pass full_state_dict(model)"))
    if sharded := [name for name, value in state_dict.items() if isinstance(value, DTensor)]:
        rule = "load_full_state_dict takes full, plain tensors"
        fix = "Pass full_state_dict(model), or load sharded tensors with model.load_state_dict"
        raise ShardkitError(message("state_dict", f"has a DTensor at {listing(sharded)}", rule, fix))
    refuse_meta((name, value) for name, value in state_dict.items() if isinstance(value, Tensor))
    return state_dict
