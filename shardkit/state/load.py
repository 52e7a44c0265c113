"""Loads: what fits the model, :func:`load_full_state_dict`, and where any load writes."""

from __future__ import annotations

import logging
import math
import re
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
from shardkit.meta.targets import (
    Target,
    check_unbound,
    find_targets,
    forget,
    install,
    prepare,
    target_device,
)
from shardkit.ranks import Groups, check_equal, groups_of, raise_on_all_ranks
from shardkit.shards import as_sharded, local_value, wrapped_as
from shardkit.state.model import (
    ModelState,
    clean_name,
    first_names,
    is_extra,
    model_state,
    module_of,
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
    request = Request(
        "state_dict", strict, key_map=clean_name, converts=_converts, fix=fix, error=ShardkitError
    )
    # 1. The rank that has the dict tells the others what is in it.
    with raise_on_all_ranks(groups, call="load_full_state_dict"):
        state = live_state(model)
        ranks = model_group(state.tensors.values()) if src == "rank0" else EACH_ALONE
        given = state_dict if ranks.is_root else {}
        described = _described(given)
    check_equal({"src": src, "strict": strict, "assign": assign}, groups)
    described = share(described, ranks)
    # 2. Each rank matches that with its model, and allocates what is new.
    with raise_on_all_ranks(groups):
        wanted = {name: state.tensors.get(name) for name in state.order}
        plan = plan_load(wanted, described, request)
        dtypes = {}
        for name, source in plan.copies.items():
            if name in state.tensors:
                dtypes[name] = described[source].dtype if assign else state.tensors[name].dtype

        def are_equal(name: str, one: str, other: str) -> bool:
            value = given[one].to(dtypes[name])
            return torch.equal(value, given[other].to(value))

        if given:
            check_ties(plan, are_equal, request)
        memory = LoadMemory(model, state.tensors, dtypes)
        memory.compute()
    # 3. The values travel, and new memory gets into the model.
    moves = []
    for name in dtypes:
        source = plan.copies[name]
        target = memory.of(state.tensors[name])
        moves.append(Move(target, given.get(source), described[source].dtype))
    scatter(moves, ranks)
    memory.install()
    modules: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        modules[clean_name(path)] = module
    for name, source in plan.copies.items():
        if name in state.others:
            modules[module_of(name)].set_extra_state(described[source])
    return plan.keys


def load_groups(model: nn.Module, src: Source) -> Groups:
    """Return the groups that load into a model: of its meshes, or all ranks if one has the tensors.
    Local.
    """
    if src not in ("rank0", "all"):
        raise ShardkitError(
            f'src must be "rank0" or "all", got {src!r}. Pass src="all" if every rank has the dict.'
        )
    groups = groups_of(model)
    is_world = src == "rank0" and dist.is_initialized() and dist.get_world_size() > 1
    return [None] if is_world and not groups else groups


def _converts(have: torch.dtype, want: torch.dtype) -> bool:
    """Whether ``copy_`` keeps the values: it drops imaginary parts."""
    return want.is_complex or not have.is_complex


def _described(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict with a :class:`Spec` for each tensor; raise unless it has full tensors with
    values.
    """
    described, sharded = {}, []
    for name, value in state_dict.items():
        is_tensor = isinstance(value, Tensor) and not is_extra(name)
        described[name] = Spec(value.dtype, value.shape) if is_tensor else value
        if isinstance(value, DTensor):
            sharded.append(name)
    if sharded:
        raise ShardkitError(
            f"state_dict has a DTensor at {listing(sharded)}. load_full_state_dict takes full, "
            "plain tensors. Pass full_state_dict(model), or load sharded tensors with "
            "model.load_state_dict."
        )
    refuse_meta((name, value) for name, value in state_dict.items() if isinstance(value, Tensor))
    return described


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
    sources: dict[str, str] = {}  # the offered name for each of the model's
    unexpected, twice = [], []
    for source in offered:
        name = rename(source, request.key_map)
        if name is None:
            continue
        if name in sources:
            twice.append(name)
        sources.setdefault(name, source)
        if name not in wanted:
            unexpected.append(source)
    firsts = first_names(
        {name: value for name, value in wanted.items() if isinstance(value, Tensor)}
    )
    copies: dict[str, str] = {}
    ties, misfits = [], []
    for name, like in wanted.items():
        if name not in sources:
            continue
        source, first = sources[name], firsts.get(name, name)
        if first not in copies:
            copies[first] = source
        elif copies[first] != source:  # another name of a tied tensor
            ties.append((first, name, source))
        if not isinstance(like, Tensor):
            continue
        have, dtype = offered[source], (dtypes or {}).get(first, like.dtype)
        if not isinstance(have, Spec):
            misfits.append(f"{name} ({type(have).__name__}, not a tensor)")
        elif have.shape != like.shape:
            misfits.append(f"{name} (shape {tuple(have.shape)}, the model has {tuple(like.shape)})")
        elif not request.converts(have.dtype, dtype):
            misfits.append(f"{name} ({have.dtype}, the model has {dtype})")
    missing = [name for name in wanted if firsts.get(name, name) not in copies]
    problems = {"mapped to twice": twice, "of a different shape or dtype": misfits}
    if request.strict:
        problems |= {"missing": missing, "unexpected": unexpected}
    advice = f"Names, shapes and dtypes must match; nothing was changed. {request.fix}."
    raise_listed(request.where, problems, advice, request.error)
    return LoadPlan(copies, ties, IncompatibleKeys(missing, unexpected))


def raise_listed(
    subject: str,
    problems: Mapping[str, Sequence[str]],
    advice: str,
    error: type[ShardkitError] = ShardkitError,
) -> None:
    """Raise one error with every name of every kind of problem, if there is any."""
    there = {kind: names for kind, names in problems.items() if names}
    if there:
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in there.items())
        lines = [f"{subject} does not match: {counts}. {advice}"]
        for kind, names in there.items():
            lines += [f"- {kind}: {name}" for name in names]
        raise error("\n".join(lines))


def check_ties(
    plan: LoadPlan, are_equal: Callable[[str, str, str], bool], request: Request
) -> None:
    """Compare the values that are offered for one tensor; a difference is an error, if strict, or a
    warning. Local.
    """
    differing = []
    for first, name, source in plan.ties:
        if not are_equal(first, plan.copies[first], source):
            differing.append(f"{name} differs from {first}")
    if differing:
        text = (
            f"{request.where}: {'; '.join(differing)}. They are one tied tensor in the model, with "
            "one value. Untie them (config.tie_word_embeddings=False), leave one out, or pass "
            "strict=False to take the first."
        )
        if request.strict:
            raise request.error(text)
        logger.warning(text)


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
    live: set[int] = set()
    for module in model.modules():
        live.update(map(id, module._parameters.values()))
        live.update(map(id, module._buffers.values()))
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


class LoadMemory:
    """The memory that a load writes to, for the tensors in ``dtypes``. Local.

    A tensor that is on meta, or changes its dtype, gets new memory; others are written in place.
    Meta tensors that the load does not write, such as non-persistent buffers, get the values of
    their construction. Making it changes nothing; it raises if a meta tensor would get no value, or
    cannot be replaced.
    """

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self._model = model
        loaded = {id(tensors[name]) for name in dtypes}
        self._others = [target for target in find_targets(model) if id(target.tensor) not in loaded]
        self._player = prepare(model, self._others) if self._others else None
        # Of the construction's values, equal on all ranks.
        self.digest = None if self._player is None else self._player.digests()
        new: dict[int, torch.dtype] = {}
        for name, dtype in dtypes.items():
            if tensors[name].is_meta or tensors[name].dtype != dtype:
                new[id(tensors[name])] = dtype
        self._new: dict[int, Target] = {}
        for target in find_targets(model, lambda tensor: id(tensor) in new) if new else ():
            if id(target.tensor) in new:  # not other meta tensors, which are found too
                self._new[id(target.tensor)] = target
        check_unbound([*self._new.values()])
        home_of = target_device(model) if new else None
        for key, target in self._new.items():
            tensor = target.tensor
            home = home_of(tensor) if home_of and tensor.is_meta else tensor.device
            target.value = unwritten(tensor, new[key], home)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the tensor to write to for one of the model's."""
        target = self._new.get(id(tensor))
        return tensor if target is None or target.value is None else target.value

    def compute(self) -> None:
        """Compute the values that the load does not write. Local; the model is unchanged."""
        if self._player is not None:
            self._player.compute()

    def install(self) -> None:
        """Put new memory under the model's tensor objects. Local."""
        targets = [*self._new.values(), *self._others]
        if targets:
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
