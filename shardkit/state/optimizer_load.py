"""Load optimizer state by FQN into optimizers, also fresh ones, of models in any layout."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.boxes import EACH_ALONE, Move, model_group, scatter, share
from shardkit.errors import ShardkitError
from shardkit.ranks import groups_of, together
from shardkit.shards import as_sharded, local_value, replicated
from shardkit.state.load import Source, Spec, load_groups, raise_listed, unwritten
from shardkit.state.model import clean_name, parameter_names
from shardkit.state.optimizer import (
    CLASS,
    OTHERS,
    OptimizerState,
    group_names,
    is_quantized,
    optimizers_of,
    renamed_state,
    sharded_optimizer_state_dict,
    tensor_leaves,
    values_of,
    with_leaves,
)

_NO_OPTIONS = ("params", "param_names", OTHERS, CLASS)


def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    state_dict: Mapping[str, Any],
    *,
    src: Source = "rank0",
) -> None:
    """Load a :func:`full_optimizer_state_dict`, or torch's ``get_optimizer_state_dict`` of full
    tensors.

    Afterwards the optimizer has exactly the dict's state: a fresh one is restored without a step,
    and a parameter without an entry has no state. Options of groups are matched by FQN; those that
    the dict lacks stay, and tensors among them (``lr``) are written in place.
    ``optimizer.load_state_dict`` is called last: its hooks run, and it converts state to the
    parameters' dtypes. LR schedulers keep working, also those made before.

    State with a parameter's shape is sharded like the parameter, other state is replicated on its
    mesh, and scalars are plain; if the optimizer has state already, its placements are kept.
    torchao's optimizers quantize the values. **Collective**; messages are as in
    :func:`load_full_state_dict`.

    Args:
        model: the model whose parameters are optimized.
        optimizer: one, or several of different parameters.
        state_dict: with ``src="rank0"`` it is read only on the lowest rank that holds a part of the
            model.
        src: ``"rank0"``, or ``"all"`` if every rank has the same dict.

    Raises:
        ShardkitError: on every rank, with nothing changed: the dict is not an optimizer's state by
            FQN; or, all listed, parameters that only one side has, and groups whose parameters have
            different options in the dict.
    """
    groups = load_groups(model, src)
    with together(groups, call="load_full_optimizer_state_dict") as poll:
        poll.same = {"src": src}
        optimizers, names = optimizers_of(optimizer), parameter_names(model)
        ranks = model_group(names) if src == "rank0" else EACH_ALONE
        given = by_name(state_dict) if ranks.is_root else {"state": {}}
        state: dict[str, Any] = with_leaves(
            given["state"], lambda _, t: values_of(t) if is_quantized(t) else t
        )
        described = {
            **given,
            "state": with_leaves(state, lambda _, full: Spec(full.dtype, full.shape)),
        }
        packed = pickle.dumps(described) if ranks.is_root else b""
        poll.own = len(packed)
    described = pickle.loads(share(packed, poll.any, ranks))
    with together(groups):
        check_names(optimizers, names, described)
        plan = plan_state(model, optimizers, described["state"], initialize=False)
    fulls, specs = tensor_leaves(state), tensor_leaves(described["state"], Spec)
    in_one_order = sorted(plan.targets)  # on all ranks
    scatter(
        [Move(plan.targets[path], fulls.get(path), specs[path].dtype) for path in in_one_order],
        ranks,
    )
    plan.quantize()
    install(optimizers, names, described | {"state": plan.state})


def load_sharded_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], state_dict: Mapping[str, Any]
) -> None:
    """Load a :func:`sharded_optimizer_state_dict` of the same layout, without copies.

    Like :func:`load_full_optimizer_state_dict`, but each rank passes its own part, and its tensors
    become the optimizer's. Ranks exchange only success or failure.

    Raises:
        ShardkitError: on every rank, with nothing changed, as
            :func:`load_full_optimizer_state_dict`.
    """
    with together(groups_of(model)):
        given = by_name(state_dict)
        optimizers, names = optimizers_of(optimizer), parameter_names(model)
        check_names(optimizers, names, given)
    install(optimizers, names, given)


@dataclass
class StatePlan:
    """Where a load writes an optimizer's state."""

    state: dict[str, Any]  # by FQN, for the optimizer; existing tensors where they fit
    targets: dict[str, Tensor]  # what to fill, by the paths of :func:`tensor_leaves` in the state
    # state that holds quantized values, and the target with the values
    quantized: list[tuple[Tensor, Tensor]]

    @torch.no_grad()
    def quantize(self) -> None:
        """Write the values that were loaded into quantized state. Local."""
        for into, values in self.quantized:
            local_value(into).copy_(local_value(values))


def plan_state(
    model: nn.Module, optimizers: list[Optimizer], saved: Mapping[str, Any], *, initialize: bool
) -> StatePlan:
    """Return memory for saved state, which has a :class:`Spec` in the place of each tensor. Local,
    changes nothing.

    Values are quantized where the optimizer has quantized state, or would make it: torchao's, and
    any with ``initialize``.
    """
    params = {name: param for param, name in parameter_names(model).items()}
    present: dict[str, Any] = {}
    for optimizer in optimizers:
        makes = initialize or "torchao" in {
            kind.__module__.split(".")[0] for kind in type(optimizer).__mro__
        }
        present |= sharded_optimizer_state_dict(model, optimizer, initialize=makes)["state"]
    existing: dict[str, Tensor] = tensor_leaves(present)
    plan = StatePlan({}, {}, [])

    for fqn, entry in saved.items():

        def place(path: str, spec: Spec, fqn: str = fqn) -> Tensor:
            old = existing.get(path)
            if (
                old is not None
                and not is_quantized(old)
                and (old.shape, old.dtype) == (spec.shape, spec.dtype)
            ):
                target = old
            else:
                target = room_for(params[fqn], path.removeprefix(f"/{fqn}/"), spec, old)
            plan.targets[path] = target
            if old is not None and is_quantized(old):
                plan.quantized.append((old, target))
                return old
            return target

        plan.state[fqn] = with_leaves(entry, place, Spec, f"/{fqn}")
    return plan


def room_for(param: nn.Parameter, path: str, spec: Spec, present: Tensor | None) -> Tensor:
    """Return memory for a tensor of a parameter's state, as :func:`load_full_optimizer_state_dict`
    says. Local.
    """
    home = local_value(param).device
    if isinstance(present, DTensor) and present.shape == spec.shape:
        return unwritten(present, spec.dtype, local_value(present).device)
    scalar = not spec.shape and (param.ndim > 0 or path == "step")
    if scalar or not isinstance(param, DTensor):
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu" if scalar else home)
    if spec.shape == param.shape:  # plain memory, whatever subclass the weight is of
        return as_sharded(
            torch.empty(local_value(param).shape, dtype=spec.dtype, device=home), param
        )
    # A DTensor, since it was computed from one, such as the row and column means of Adafactor.
    return replicated(torch.empty(spec.shape, dtype=spec.dtype, device=home), param.device_mesh)


def by_name(state_dict: Mapping[str, Any]) -> OptimizerState:
    """Return the dict by clean names; raise unless it is an optimizer's state by FQN."""
    names = [
        name
        for group in state_dict.get("param_groups", [{}])
        for name in group.get("params", [None])
    ]
    if "state" not in state_dict or any(
        not isinstance(name, str) for name in (*names, *state_dict["state"])
    ):
        raise ShardkitError(
            "state_dict must be {'state': {fqn: ...}, 'param_groups': [{'params': [fqn, ...], "
            "...}]}. State by number depends on the order in which an optimizer was given its "
            "parameters. Pass full_optimizer_state_dict(model, optimizer)."
        )
    return renamed_state(state_dict, clean_name)


def mismatches(own: Sequence[list[str]], found: OptimizerState) -> dict[str, list[str]]:
    """Return what does not fit an optimizer with these groups of FQNs, by kind. Pure."""
    known = set(chain.from_iterable(own))
    options = options_by_name(found)
    problems: dict[str, list[str]] = {
        "missing": [fqn for fqn in chain.from_iterable(own) if fqn not in options],
        "unexpected": [
            fqn for fqn in dict.fromkeys((*options, *found["state"])) if fqn not in known
        ],
        "with different options": [],
    }
    for fqns in own:
        groups = list(
            {id(group): group for fqn in fqns if (group := options.get(fqn)) is not None}.values()
        )
        keys = [key for key in dict.fromkeys(chain(*groups)) if key not in _NO_OPTIONS]
        values = [[_plain(group.get(key, ...)) for group in groups] for key in keys]
        if differ := [
            key
            for key, of_key in zip(keys, values, strict=True)
            if of_key.count(of_key[0]) < len(groups)
        ]:
            problems["with different options"].append(f"group of {fqns[0]}: {', '.join(differ)}")
    return problems


def options_by_name(state: OptimizerState) -> dict[str, dict[str, Any]]:
    """Return the group of each parameter."""
    return {fqn: group for group in state["param_groups"] for fqn in group["params"]}


def _plain(option: Any) -> Any:
    """Return an option with numbers instead of tensors, to compare."""
    if isinstance(option, (list, tuple)):
        return [_plain(each) for each in option]
    return option.tolist() if isinstance(option, Tensor) else option


def other_classes(
    optimizers: Iterable[Optimizer], own: Sequence[list[str]], found: OptimizerState
) -> list[str]:
    """Return the classes of optimizers where one with other options was saved, and that one's.
    Pure.

    The options of one may be a part of the other's: AdamW and torchao's AdamW8bit load each other's
    state.
    """
    options = options_by_name(found)
    groups = [
        (type(each).__name__, each.defaults, group)
        for each in optimizers
        for group in each.param_groups
    ]
    pairs = dict[str, None]()
    for (name, defaults, group), fqns in zip(groups, own, strict=True):
        saved = next((options[fqn] for fqn in fqns if fqn in options), {})
        differs = defaults.keys() - saved.keys() and saved.keys() - group.keys() - {*_NO_OPTIONS}
        if differs and saved.get(CLASS, name) != name:
            pairs[f"{name}, and {saved[CLASS]} was saved"] = None
    return list(pairs)


def check_names(
    optimizers: Iterable[Optimizer], names: Mapping[nn.Parameter, str], found: OptimizerState
) -> None:
    """Raise ShardkitError unless the state has the parameters of the optimizers, with their
    options. Local.
    """
    own = [fqns for each in optimizers for fqns in group_names(each, names)]
    rule = "Parameters and the options of groups must match; nothing was changed"
    fix = "Build the optimizer from the same parameters, in the same groups"
    raise_listed("state_dict", mismatches(own, found), rule, fix)


def install(
    optimizers: list[Optimizer],
    names: Mapping[nn.Parameter, str],
    state: OptimizerState,
    *,
    exact: bool = False,
) -> None:
    """Load each optimizer's state, and the options of its parameters' groups, by
    ``load_state_dict``. Local.

    Options that the state lacks stay. ``exact`` keeps the state's dtypes, which torch converts to
    the parameters'.
    """
    options = options_by_name(state)
    empty = iter([group for group in state["param_groups"] if not group["params"]])
    for optimizer in optimizers:
        packed, fqns = optimizer.state_dict(), group_names(optimizer, names)
        before = [dict(group) for group in optimizer.param_groups]
        groups = []
        for group, own in zip(packed["param_groups"], fqns, strict=True):
            saved = (
                next((options[fqn] for fqn in own if fqn in options), {})
                if own
                else next(empty, {})
            )
            groups.append(
                {**group, **{key: value for key, value in saved.items() if key not in _NO_OPTIONS}}
            )
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        found = zip(numbers, chain.from_iterable(fqns), strict=True)
        groups_of_others = (options.get(fqn, {}) for fqn in chain(*fqns))
        others: dict[str, Any] = next(
            (group[OTHERS] for group in groups_of_others if OTHERS in group), {}
        )
        entries = {number: state["state"][fqn] for number, fqn in found if fqn in state["state"]}
        entries |= others.get("state", {})
        optimizer.load_state_dict({**packed, **others, "state": entries, "param_groups": groups})
        for old, new in zip(before, optimizer.param_groups, strict=True):
            for key, tensor in old.items():
                if isinstance(tensor, Tensor):  # compiled code holds on to tensors such as ``lr``
                    new[key] = tensor.copy_(torch.as_tensor(new[key]))
        for param, fqn in names.items() if exact else ():
            kept = optimizer.state.get(param, {})
            for name, value in state["state"].get(fqn, {}).items() if kept else ():
                if name != "step" and isinstance(value, Tensor) and kept[name].dtype != value.dtype:
                    # which load_state_dict cast to the parameter's dtype
                    kept[name] = value.to(kept[name].device)
