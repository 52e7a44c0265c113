"""load_full_state_dict: plain, full tensors into a model, sharded or not."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.errors import ShardkitError, listing, message
from shardkit.meta.rest import Rest
from shardkit.meta.shards import Target, install
from shardkit.ranks import Groups, groups_of, together
from shardkit.state.model import first_names, refuse_meta
from shardkit.state.names import ModelState, clean_name, repeated
from shardkit.state.place import live_state, new_memory
from shardkit.state.routes import Lead, find_lead
from shardkit.state.scatter import Move, cut, scatter, share

Source = Literal["rank0", "all"]


class IncompatibleKeys(NamedTuple):
    """What a load that is not strict left alone, as ``nn.Module.load_state_dict`` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    src: Source = "rank0",
    strict: bool = True,
    assign: bool = False,
) -> IncompatibleKeys:
    """Load plain, full tensors by FQN, such as :func:`full_state_dict` gives, into a model of any layout.

    In place: parameters and buffers stay the same objects, so optimizers, ties and attributes still point at them, and
    values that are there are overwritten where they are. Values are converted to the model's dtypes. The dict is left
    as it was, and shares no memory with the model afterwards. Of tied tensors one name is enough; of several the last
    one of the model counts, as for torch. Names in the dict may have the wrappers ``_orig_mod`` and
    ``_checkpoint_wrapped_module``, or not. Hooks of ``load_state_dict`` do not run.

    A model on meta is materialised: what the dict has gets memory where the mesh wants it (the CPU where offloaded),
    and other meta tensors, such as non-persistent buffers, what the construction computes, as by ``materialize``.

    **Collective**: every rank calls it. ``src="rank0"`` sends each rank its own shard alone, straight from the dict
    and into place where dtypes agree, and broadcasts what ranks hold whole; ``src="all"`` exchanges no tensor, only
    whether all ranks are content. Besides the shards, the most that is held is one bucket of 64 MiB or one tensor.

    Args:
        model: any module, with values or on meta, sharded by anyone or not at all.
        state_dict: full tensors on any device. With ``src="rank0"`` it is read on the lowest rank that holds a part
            of the model, and ignored on others, where it may be ``{}``.
        src: ``"rank0"``, or ``"all"`` where every rank has the same dict.
        strict: raise for missing and unexpected names. False leaves them alone, and returns them.
        assign: take over the dict's dtypes, in new memory where they differ from the model's, which belongs before
            the first forward. It never shares the dict's memory, as torch's ``assign`` does: a shard is no such tensor.

    Returns:
        ``missing_keys`` and ``unexpected_keys``; both empty when strict.

    Raises:
        ShardkitError: on every rank, with nothing changed: names that are missing or unexpected, shapes that differ,
            values that are no plain tensors with values (all listed together); a hook on ``state_dict()`` replaces the
            model's tensors; meta tensors that neither the dict nor the construction gives a value.

    Example:
        >>> state = torch.load("model.pt") if rank == 0 else {}
        >>> load_full_state_dict(model, state)
    """
    groups = groups_of(model) or world_groups(src)
    with together(groups, call="load_full_state_dict"):
        check_src(src)
        state = live_state(model)
        lead = find_lead(state.tensors.values())
        given = _given(state_dict) if src == "all" or lead.is_here else {}
        found = _described(given)
        load = _plan(model, state, found, strict, assign) if src == "all" else None
    if load is None:
        found = pickle.loads(share(pickle.dumps(found), lead))
        with together(groups):
            load = _plan(model, state, found, strict, assign)
    transfer(load.moves(given), lead, src)
    if load.targets or load.rest is not None:
        install(model, [*load.targets, *(load.rest.targets if load.rest is not None else [])])
    if load.rest is not None:
        load.rest.forget()
    _set_extras(model, load.extras)
    return load.keys


@dataclass(frozen=True)
class _Spec:
    """A tensor of the dict, as ranks tell each other."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Load:
    """What one load will do.

    Attributes:
        specs: for each name that is read, what the dict has.
        tensors: what that is written to: the model's.
        targets: those of them that get new memory, with it.
        rest: the meta tensors that the dict does not give; None for a model with values.
        extras: ``_extra_state`` by name.
        keys: what is missing and unexpected.
    """

    specs: Mapping[str, _Spec]
    tensors: Mapping[str, Tensor]
    targets: list[Target]
    rest: Rest | None
    extras: Mapping[str, object]
    keys: IncompatibleKeys

    def moves(self, given: Mapping[str, Any]) -> Iterator[Move]:
        """What goes where."""
        new = {id(target.tensor): target.value for target in self.targets}
        for name, spec in self.specs.items():
            tensor = new.get(id(self.tensors[name]), self.tensors[name])
            assert tensor is not None, "targets have memory"
            yield Move(tensor, spec.dtype, given.get(name))


def check_src(src: object) -> None:
    """Raise for an unknown ``src``."""
    if src not in ("rank0", "all"):
        rule = 'It is "rank0" (one rank has the tensors) or "all" (every rank has them)'
        raise ShardkitError(message("src", f"is {src!r}", rule, "Pass one of the two"))


def world_groups(src: Source) -> Groups:
    """The ranks that share a model without DTensors: all of them, if one is to send it to the others."""
    return [None] if src == "rank0" and dist.is_initialized() and dist.get_world_size() > 1 else []


def transfer(moves: Iterator[Move], lead: Lead, src: Source) -> None:
    """Carry out the moves, and let autograd see that the targets were written. Collective if ``src`` is one rank."""
    done: list[Tensor] = []

    def noted() -> Iterator[Move]:
        for move in moves:
            done.append(move.target)
            yield move

    cut(noted()) if src == "all" else scatter(noted(), lead)
    torch.autograd.graph.increment_version(done)


def _given(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The dict by clean names, checked to hold what can be loaded."""
    if not isinstance(state_dict, Mapping):
        problem = f"is a {type(state_dict).__name__}"
        raise ShardkitError(message("state_dict", problem, "It maps names to tensors", "Pass a state dict"))
    names = [clean_name(name) for name in state_dict]
    if twice := repeated(names):
        raise ShardkitError(message("state_dict", f"has {listing(twice)} twice", "Names are unique", "Drop one"))
    given = dict(zip(names, state_dict.values(), strict=True))
    if sharded := [name for name, value in given.items() if isinstance(value, DTensor)]:
        rule = "load_full_state_dict takes full, plain tensors"
        fix = "Pass full_state_dict(model), or load sharded tensors with model.load_state_dict"
        raise ShardkitError(message("state_dict", f"{listing(sharded)} is a DTensor", rule, fix))
    refuse_meta((name, value) for name, value in given.items() if isinstance(value, Tensor))
    return given


def _described(given: Mapping[str, Any]) -> dict[str, Any]:
    return {n: _Spec(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for n, v in given.items()}


def _plan(model: nn.Module, state: ModelState, found: Mapping[str, Any], strict: bool, assign: bool) -> _Load:
    """Check that the dict fits, then make ready all that the load needs besides values. Changes no tensor. Local."""
    first = first_names(state.tensors)
    chosen = {first[name]: name for name in state.tensors if name in found}  # the last of tied names
    missing = [n for n in state.order if n not in found and first.get(n) not in chosen]
    keys = IncompatibleKeys(missing, [name for name in found if name not in state.order])
    _check(state, found, keys, strict)
    specs = {name: found[name] for name in chosen.values()}
    dtypes = {id(t): specs[n].dtype if assign else t.dtype for n, t in state.tensors.items() if n in specs}
    extras = {name: found[name] for name in state.others if name in found}
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    rest = Rest(model, dtypes.keys()) if on_meta else None
    load = _Load(specs, state.tensors, new_memory(model, dtypes), rest, extras, keys)
    if rest is not None:
        rest.compute()
    return load


def _check(state: ModelState, found: Mapping[str, Any], keys: IncompatibleKeys, strict: bool) -> None:
    misfits = [f"{n} ({why})" for n, t in state.tensors.items() if n in found for why in _misfit(found[n], t)]
    problems = {"not fitting": misfits}
    if strict:
        problems |= {"missing": keys.missing_keys, "unexpected": keys.unexpected_keys}
    raise_listed("state_dict", problems, "strict=False leaves missing and unexpected names alone")


def _misfit(spec: Any, tensor: Tensor) -> Iterator[str]:
    if not isinstance(spec, _Spec):
        yield f"a {type(spec).__name__}, no tensor"
    elif spec.shape != tuple(tensor.shape):
        yield f"shape {spec.shape} in the dict, {tuple(tensor.shape)} in the model"
    elif spec.dtype.is_complex and not tensor.is_complex():
        yield f"{spec.dtype} in the dict, {tensor.dtype} in the model"


def raise_listed(subject: str, problems: Mapping[str, list[str]], fix: str) -> None:
    """Raise one error with every name of every kind of problem, if there is any."""
    there = {kind: names for kind, names in problems.items() if names}
    if there:
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in there.items())
        lines = [f"- {kind}: {name}" for kind, names in there.items() for name in names]
        rule = "Names and shapes must fit; nothing was changed"
        raise ShardkitError("\n".join([message(subject, counts, rule, fix), *lines]))


def _set_extras(model: nn.Module, extras: Mapping[str, object]) -> None:
    modules = {clean_name(name): module for name, module in model.named_modules()}
    for name, value in extras.items():
        setter: Callable[[object], None] = modules[name.rpartition(".")[0]].set_extra_state
        setter(value)
