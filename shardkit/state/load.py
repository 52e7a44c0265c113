"""Loads: what fits the model, :func:`load_full_state_dict`, and where any load writes."""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import is_wrapper, local_tensor
from shardkit.boxes import EACH_ALONE, Move, model_group, scatter, share
from shardkit.errors import CheckpointError, ShardkitError, listing
from shardkit.meta.materialize import (
    check_unbound,
    find_targets,
    forget,
    install,
    is_on_meta,
    prepare,
    target_device,
)
from shardkit.ranks import Groups, groups_of, together
from shardkit.shards import as_sharded, local_value, wrapped_as
from shardkit.state.model import (
    ModelState,
    clean_name,
    first_names,
    is_extra,
    model_state,
    refuse_meta,
)

logger = logging.getLogger("shardkit")

Source = Literal["rank0", "all"]
# Maps offered names to the model's: a function (None leaves the name out), a dict of full names, or
# pairs of a regular expression and its replacement.
KeyMap: TypeAlias = "Callable[[str], str | None] | Mapping[str, str] | Sequence[tuple[str, str]]"


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    src: Source = "rank0",
    strict: bool = True,
    assign: bool = False,
) -> IncompatibleKeys:
    """Load plain, full tensors by FQN, such as :func:`full_state_dict` gives, into a model of any
    layout.

    In place: parameters and buffers stay the same objects. Values are converted to the model's
    dtypes, and share no memory with the dict. One name of tied tensors is enough; the values of
    several must be equal. Wrappers in names, such as ``_orig_mod``, are left out. Hooks of
    ``load_state_dict`` do not run. A model on meta is materialized; tensors that are not in the
    dict, such as non-persistent buffers, get the values of their construction.

    **Collective**. With ``src="rank0"`` that rank sends each part once, and replicas broadcast it;
    with ``src="all"`` ranks exchange only success or failure. Besides the shards, one bucket of 64
    MiB or one tensor is held.

    Args:
        model: any module, with values or on meta, sharded or not.
        state_dict: full tensors on any device; with ``src="rank0"`` read only on the lowest rank of
            the model.
        src: ``"rank0"``, or ``"all"`` if every rank has the same dict.
        strict: raise for missing and unexpected names, and for different values of one tied tensor.
            False returns such names, and takes the first of the values with a warning.
        assign: take over the dict's dtypes, in new memory where they differ. Use it before the
            first forward.

    Returns:
        ``missing_keys`` and ``unexpected_keys``; both empty when strict.

    Raises:
        ShardkitError: on every rank, with nothing changed: missing or unexpected names, different
            shapes, values that are not plain tensors with values (all listed); hooks on
            ``state_dict()`` that replace the model's tensors; meta tensors that would get no value.
    """
    groups = load_groups(model, src)
    fix = "Pass strict=False to ignore names that only one side has"
    request = Request("state_dict", strict, clean_name, _converts, fix, ShardkitError)
    with together(groups, call="load_full_state_dict") as poll:
        poll.same = {"src": src, "strict": strict, "assign": assign}
        state = live_state(model)
        ranks = model_group(state.tensors.values()) if src == "rank0" else EACH_ALONE
        given = _checked(state_dict) if ranks.is_root else {}
        tensors = {
            name: value
            for name, value in given.items()
            if isinstance(value, Tensor) and not is_extra(name)
        }
        offered: dict[str, Any] = {
            **given,
            **{n: Spec(value.dtype, value.shape) for n, value in tensors.items()},
        }
        if src == "all":
            plan, room, moves = _planned(model, state, given, offered, request, assign)
        packed = pickle.dumps(offered) if src == "rank0" and ranks.is_root else b""
        poll.own = len(packed)
    if src == "rank0":
        offered = pickle.loads(share(packed, poll.any, ranks))
        with together(groups):
            plan, room, moves = _planned(model, state, given, offered, request, assign)
    scatter(moves, ranks)
    room.install()
    if extra := [(name, source) for name, source in plan.copies.items() if name in state.others]:
        modules: dict[str, Any] = {
            clean_name(name): each for name, each in model.named_modules(remove_duplicate=False)
        }
        for name, source in extra:
            modules[name.rpartition(".")[0]].set_extra_state(offered[source])
    return plan.keys


def _planned(
    model: nn.Module,
    state: ModelState,
    given: Mapping[str, Any],
    offered: Mapping[str, Any],
    request: Request,
    assign: bool,
) -> tuple[LoadPlan, Room, list[Move]]:
    """Return what fits of the dict, the memory to write to, and what is written, given this rank's
    tensors. Local.
    """
    plan = plan_load({name: state.tensors.get(name) for name in state.order}, offered, request)
    sources = {name: source for name, source in plan.copies.items() if name in state.tensors}
    dtypes = {
        name: offered[s].dtype if assign else state.tensors[name].dtype
        for name, s in sources.items()
    }
    if given:
        check_ties(plan, lambda name, a, b: _are_equal(given[a], given[b], dtypes[name]), request)
    room = Room(model, state.tensors, dtypes)
    room.compute()
    return (
        plan,
        room,
        [
            Move(room.of(state.tensors[n]), given.get(s), offered[s].dtype)
            for n, s in sources.items()
        ],
    )


def load_groups(model: nn.Module, src: Source) -> Groups:
    """Return the groups that load into a model: of its meshes, or all ranks if one has the tensors.
    Local.
    """
    if src not in ("rank0", "all"):
        raise ShardkitError(
            f'src must be "rank0" or "all", got {src!r}. Pass src="all" if every rank has the dict.'
        )
    several = dist.is_initialized() and dist.get_world_size() > 1
    return groups_of(model) or [None] * (src == "rank0" and several)


def _converts(have: torch.dtype, want: torch.dtype) -> bool:
    return want.is_complex or not have.is_complex  # whose imaginary parts ``copy_`` would drop


def _are_equal(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    return one is other or same_values(one.to(dtype), other.to(one.device, dtype))


def _checked(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the dict; raise unless it holds full tensors with values."""
    if sharded := [name for name, value in state_dict.items() if isinstance(value, DTensor)]:
        raise ShardkitError(
            f"state_dict has a DTensor at {listing(sharded)}. load_full_state_dict takes full, "
            "plain tensors. Pass full_state_dict(model), or load sharded tensors with "
            "model.load_state_dict."
        )
    refuse_meta((name, value) for name, value in state_dict.items() if isinstance(value, Tensor))
    return state_dict


# ---- what fits: names are paired, and everything that does not fit is reported, before anything is


class IncompatibleKeys(NamedTuple):
    """The names that a load with ``strict=False`` left alone, as ``nn.Module.load_state_dict``
    returns them.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Spec:
    """The dtype and shape of a full tensor."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def bytes(self) -> int:
        """The bytes of the full tensor."""
        # torch.Size.numel() wraps around at 2**63
        return math.prod(self.shape) * self.dtype.itemsize


def among_floats(have: torch.dtype, want: torch.dtype) -> bool:
    """Whether a conversion is between floating-point dtypes."""
    return have == want or (have.is_floating_point and want.is_floating_point)


@dataclass(frozen=True)
class Request:
    """How the offered tensors may differ from the wanted ones, and what errors say."""

    where: str  # the subject of errors
    # missing and unexpected names, and different values for one tied tensor, are errors
    strict: bool = True
    key_map: KeyMap | None = None  # from offered names to the model's
    # whether the first may become the second
    converts: Callable[[torch.dtype, torch.dtype], bool] = among_floats
    fix: str = "Pass key_map= to rename, or strict=False to ignore names that only one side has"
    error: type[ShardkitError] = CheckpointError


@dataclass(frozen=True)
class LoadPlan:
    """Which offered tensor is loaded into which of the model's, by names."""

    # the offered name for each name that is loaded, the first one of a tied tensor
    copies: dict[str, str]
    # the first name of a tied tensor, another of its names, the offered name for that
    ties: list[tuple[str, str, str]]
    keys: IncompatibleKeys


def plan_load(
    wanted: Mapping[str, object],
    offered: Mapping[str, object],
    request: Request,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> LoadPlan:
    """Pair wanted with offered names. Pure.

    Args:
        wanted: tensors by name; one object under several names is tied, and one of its names is
            enough. Other values accept any value.
        offered: a :class:`Spec` for each tensor, and other values.
        request: how both may differ.
        dtypes: dtypes that tensors are loaded as, instead of their own.
    """
    renamed = [(rename(name, request.key_map), name) for name in offered]
    sources = {new: name for new, name in reversed(renamed) if new is not None}
    firsts = first_names(
        {name: value for name, value in wanted.items() if isinstance(value, Tensor)}
    )
    copies: dict[str, str] = {}
    ties, misfits = [], []
    for name in (name for name in wanted if name in sources):
        first, source = firsts.get(name, name), sources[name]
        if copies.setdefault(first, source) != source:
            ties.append((first, name, source))
        like, have = wanted[name], offered[source]
        if not isinstance(like, Tensor):
            continue
        dtype = (dtypes or {}).get(first, like.dtype)
        if not isinstance(have, Spec):
            misfits.append(f"{name} ({type(have).__name__}, not a tensor)")
        elif have.shape != like.shape:
            misfits.append(f"{name} (shape {tuple(have.shape)}, the model has {tuple(like.shape)})")
        elif not request.converts(have.dtype, dtype):
            misfits.append(f"{name} ({have.dtype}, the model has {dtype})")
    missing = [name for name in wanted if firsts.get(name, name) not in copies]
    unexpected = [name for new, name in renamed if new is not None and new not in wanted]
    counts = Counter(new for new, _ in renamed if new is not None)
    problems = {
        "mapped to twice": [f"{new} ({count} times)" for new, count in counts.items() if count > 1],
        "of a different shape or dtype": misfits,
        "missing": missing if request.strict else [],
        "unexpected": unexpected if request.strict else [],
    }
    rule = "Names, shapes and dtypes must match; nothing was changed"
    raise_listed(request.where, problems, rule, request.fix, request.error)
    return LoadPlan(copies, ties, IncompatibleKeys(missing, unexpected))


def raise_listed(
    subject: str,
    problems: Mapping[str, Sequence[str]],
    rule: str,
    fix: str,
    error: type[ShardkitError] = ShardkitError,
) -> None:
    """Raise one error with every name of every kind of problem, if there is any."""
    there = {kind: names for kind, names in problems.items() if names}
    if there:
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in there.items())
        lines = [f"{subject} does not match: {counts}. {rule}. {fix}."]
        for kind, names in there.items():
            lines += [f"- {kind}: {name}" for name in names]
        raise error("\n".join(lines))


def check_ties(
    plan: LoadPlan, are_equal: Callable[[str, str, str], bool], request: Request
) -> None:
    """Compare the values that are offered for one tensor; a difference is an error, if strict, or a
    warning. Local.
    """
    ties = [(f"{name} differs from {first}", first, source) for first, name, source in plan.ties]
    differ = [
        text for text, first, source in ties if not are_equal(first, plan.copies[first], source)
    ]
    if differ:
        text = (
            f"{request.where}: {'; '.join(differ)}. They are one tied tensor in the model, which "
            "has one value. Untie them (config.tie_word_embeddings=False), leave one out, or pass "
            "strict=False to take the first."
        )
        if request.strict:
            raise request.error(text)
        logger.warning(text)


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal, NaN being equal to itself. Local."""
    return torch.equal(one, other) or torch.equal(
        *(each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    )


def rename(name: str, key_map: KeyMap | None) -> str | None:
    """Return an offered name as the model's, or None to leave it out. The first pattern found in
    the name applies.
    """
    if callable(key_map):
        return key_map(name)
    if isinstance(key_map, Mapping):
        return key_map.get(name, name)
    for pattern, replacement in key_map or ():
        new, count = re.subn(pattern, replacement, name)
        if count:
            return new
    return name


# ---- where a load writes -------------------------------------------------------------------------


def live_state(model: nn.Module) -> ModelState:
    """Return :func:`model_state`; raise if a hook replaced tensors, which cannot be written to.
    Local.
    """
    state = writable(model_state(model))
    live = {
        id(each)
        for module in model.modules()
        for each in (*module._parameters.values(), *module._buffers.values())
    }
    made = [name for name, tensor in state.tensors.items() if id(tensor) not in live]
    made += [name for name in state.others if not is_extra(name)]
    if made:
        raise ShardkitError(
            f"{listing(made)} was replaced by a hook on state_dict(). Values are written into the "
            "model's own parameters and buffers, by name. Load it with model.load_state_dict, "
            "which calls the hooks that undo this."
        )
    return state


def writable(state: ModelState) -> ModelState:
    """Give tensors of ``expand`` memory of their own, since torch writes to none whose elements
    share it. Local.
    """
    for tensor in state.tensors.values():
        if 0 in tensor.stride() and not tensor.is_meta:
            tensor.data = tensor.data.contiguous()
    return state


class Room:
    """The memory that a load writes to, for the tensors in ``dtypes``. Local.

    A tensor that is on meta, or changes its dtype, gets new memory; others are written in place.
    Meta tensors that the load does not write, such as non-persistent buffers, get the values of
    their construction. Making it changes nothing; it raises if a meta tensor would get no value, or
    cannot be replaced.
    """

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        given = {id(tensors[name]): dtype for name, dtype in dtypes.items()}
        new = {
            id(t) for n, dtype in dtypes.items() if is_on_meta(t := tensors[n]) or t.dtype != dtype
        }
        self._model = model
        others = [target for target in find_targets(model) if id(target.tensor) not in given]
        self._others = others
        self._player = prepare(model, others) if others else None
        # Of the construction's values, equal on all ranks.
        self.digest = None if self._player is None else self._player.digests()
        self._targets = find_targets(model, lambda tensor: id(tensor) in new) if new else []
        self._targets = [target for target in self._targets if id(target.tensor) in new]
        check_unbound(self._targets)
        device_of = target_device(model) if new else None
        for target in self._targets:
            home = (
                device_of(target.tensor)
                if device_of and is_on_meta(target.tensor)
                else target.tensor.device
            )
            target.value = unwritten(target.tensor, given[id(target.tensor)], home)
        self._new = {id(target.tensor): target.value for target in self._targets}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the tensor to write to for one of the model's."""
        new = self._new.get(id(tensor))
        return tensor if new is None else new

    def compute(self) -> None:
        """Compute the values that the load does not write. Local; the model is unchanged."""
        if self._player is not None:
            self._player.compute()

    def install(self) -> None:
        """Put new memory under the model's tensor objects. Local."""
        if targets := [*self._targets, *self._others]:
            install(self._model, targets)
            forget(self._model)


def unwritten(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory with the placement of another tensor, and in its subclass if that
    wraps memory.
    """
    own = local_tensor(like) if isinstance(like, DTensor) else like
    local = torch.empty(own.shape, dtype=dtype, device=device)
    if not is_wrapper(local_value(like)):
        local = wrapped_as(local, own.detach())
    return as_sharded(local, like) if isinstance(like, DTensor) else local
