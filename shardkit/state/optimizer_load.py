"""Load optimizer state by FQN into optimizers, also fresh ones, of models in any layout.

Every load, from memory or from disk, is :func:`check_names`, :func:`plan_state`, writing into the
planned tensors, and :func:`install`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import is_wrapper
from shardkit.boxes import EACH_ALONE, Move, model_group, scatter, share
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import check_equal, raise_on_all_ranks, warn_once
from shardkit.shards import as_sharded, local_value, replicated
from shardkit.state.load import Source, Spec, load_groups, raise_listed, unwritten
from shardkit.state.model import clean_name, parameter_names
from shardkit.state.optimizer import (
    OptimizerState,
    group_names,
    optimizers_of,
    renamed_state,
    tensor_leaves,
    with_leaves,
)

_NO_OPTIONS = ("params", "param_names")


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
    **Collective**; messages are as in :func:`load_full_state_dict`.

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
    with raise_on_all_ranks(groups, call="load_full_optimizer_state_dict"):
        optimizers, names = optimizers_of(optimizer), parameter_names(model)
        ranks = model_group(names) if src == "rank0" else EACH_ALONE
        given = by_name(state_dict) if ranks.is_root else {"state": {}, "param_groups": []}
        specs = with_leaves(given["state"], lambda _, full: Spec(full.dtype, full.shape))
    check_equal({"src": src}, groups)
    described = share({**given, "state": specs}, ranks)
    with raise_on_all_ranks(groups):
        check_names(optimizers, names, described)
        state, targets = plan_state(optimizers, names, described["state"])
    fulls, specs = tensor_leaves(given["state"]), tensor_leaves(described["state"], Spec)
    moves = [Move(target, fulls.get(path), specs[path].dtype) for path, target in targets.items()]
    scatter(moves, ranks)
    install(optimizers, names, {**described, "state": state})


def by_name(state_dict: Mapping[str, Any]) -> OptimizerState:
    """Return the dict by clean names; raise unless it is an optimizer's state by FQN."""
    is_known = "state" in state_dict and "param_groups" in state_dict
    names = list(state_dict["state"]) if is_known else []
    for group in state_dict["param_groups"] if is_known else ():
        names += group["params"]
    if not is_known or not all(isinstance(name, str) for name in names):
        raise ShardkitError(
            "state_dict must be {'state': {fqn: ...}, 'param_groups': [{'params': [fqn, ...], "
            "...}]}. State by number depends on the order in which an optimizer was given its "
            "parameters. Pass full_optimizer_state_dict(model, optimizer)."
        )
    return renamed_state(state_dict, clean_name)


def options_by_name(state: OptimizerState) -> dict[str, dict[str, Any]]:
    """Return the group of each parameter."""
    options = {}
    for group in state["param_groups"]:
        for fqn in group["params"]:
            options[fqn] = group
    return options


def check_names(
    optimizers: Iterable[Optimizer],
    names: Mapping[nn.Parameter, str],
    saved: OptimizerState,
    *,
    subject: str = "state_dict",
    fix: str = "Build the optimizer from the same parameters, in the same groups",
    strict: bool = True,
    error: type[ShardkitError] = ShardkitError,
) -> None:
    """Raise unless the state has the parameters of the optimizers, and one set of options for each
    of their groups. Local.
    """
    options = options_by_name(saved)
    known: dict[str, None] = {}
    differing = []
    for optimizer in optimizers:
        for fqns, own in zip(group_names(optimizer, names), optimizer.param_groups, strict=True):
            known.update(dict.fromkeys(fqns))
            groups = [options[fqn] for fqn in fqns if fqn in options]
            if groups:
                _warn_of_another_class(optimizer, own, groups[0], subject)
            keys = _different_options(groups)
            if keys:
                differing.append(f"group of {fqns[0]}: {', '.join(keys)}")
    problems = {"with different options": differing}
    if strict:
        problems["missing"] = [fqn for fqn in known if fqn not in options]
        saved_names = dict.fromkeys([*options, *saved["state"]])
        problems["unexpected"] = [fqn for fqn in saved_names if fqn not in known]
    advice = f"Parameters and the options of groups must match; nothing was changed. {fix}."
    raise_listed(subject, problems, advice, error)


def _warn_of_another_class(
    optimizer: Optimizer, own: Mapping[str, Any], saved: Mapping[str, Any], subject: str
) -> None:
    """Warn if a group was saved by an optimizer of another class, whose state a step may ignore."""
    lacking = [key for key in optimizer.defaults if key not in saved]
    foreign = [key for key in saved if key not in own and key not in _NO_OPTIONS]
    if lacking and foreign:
        warn_once(
            f"{subject} was saved with options {listing(foreign)} and without {listing(lacking)}, "
            f"so not by {type(optimizer).__name__}, which may begin again without its state. Pass "
            "the class of optimizer that was saved, or load the model alone."
        )


def _different_options(groups: list[dict[str, Any]]) -> list[str]:
    """Return the options that not all of the groups have with the same value."""
    differing: dict[str, None] = {}
    for group in groups[1:]:
        for key in {**groups[0], **group}:
            is_option = key not in _NO_OPTIONS
            if is_option and group.get(key, ...) != groups[0].get(key, ...):
                differing[key] = None
    return list(differing)


def plan_state(
    optimizers: Iterable[Optimizer], names: Mapping[nn.Parameter, str], saved: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return state to install, by FQN, and its tensors to fill, by the paths of
    :func:`tensor_leaves`.

    Saved state has a :class:`Spec` in the place of each tensor; that of parameters in no optimizer
    is left out. Tensors that the optimizers have of the same shape and dtype are filled in place.
    Local; changes nothing.
    """
    params: dict[str, nn.Parameter] = {}
    present: dict[str, Any] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                params[names[param]] = param
                present[names[param]] = optimizer.state.get(param, {})
    saved = {fqn: values for fqn, values in saved.items() if fqn in params}
    existing = tensor_leaves(present)
    targets: dict[str, Tensor] = {}
    for fqn, values in saved.items():  # an FQN may have a "/" too
        for place, spec in tensor_leaves(values, Spec).items():
            path = f"/{fqn}{place}"
            old = existing.get(path)
            if old is not None and is_wrapper(local_value(old)):
                old = None  # quantized, such as torchao's, which cannot be filled
            if old is not None and (old.shape, old.dtype) == (spec.shape, spec.dtype):
                targets[path] = old
            else:
                targets[path] = _new_state(params[fqn], place[1:], spec, old)
    return with_leaves(saved, lambda path, _: targets[path], Spec), targets


def _new_state(param: nn.Parameter, key: str, spec: Spec, old: Tensor | None) -> Tensor:
    """Return memory for a tensor of a parameter's state, as :func:`load_full_optimizer_state_dict`
    says. Local.
    """
    home = local_value(param).device
    if isinstance(old, DTensor) and old.shape == spec.shape:
        return unwritten(old, spec.dtype, local_value(old).device)
    if not spec.shape and (param.ndim > 0 or key == "step"):
        return torch.empty((), dtype=spec.dtype)  # on the CPU, where torch keeps them
    if isinstance(param, DTensor) and spec.shape == param.shape:
        # plain memory, whatever subclass the weight is of
        local = torch.empty(local_value(param).shape, dtype=spec.dtype, device=home)
        return as_sharded(local, param)
    whole = torch.empty(spec.shape, dtype=spec.dtype, device=home)
    # A DTensor, since it was computed from one, such as the row and column means of Adafactor.
    return replicated(whole, param.device_mesh) if isinstance(param, DTensor) else whole


def install(
    optimizers: Iterable[Optimizer],
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
    for optimizer in optimizers:
        packed = optimizer.state_dict()
        before = [dict(group) for group in optimizer.param_groups]
        values: dict[int, Any] = {}
        groups = []
        for group, own in zip(packed["param_groups"], optimizer.param_groups, strict=True):
            loaded = dict(group)
            for number, param in zip(group["params"], own["params"], strict=True):
                fqn = names[param]
                if fqn in state["state"]:
                    values[number] = state["state"][fqn]
                for key, option in options.get(fqn, {}).items():
                    if key not in _NO_OPTIONS:
                        loaded[key] = option
            groups.append(loaded)
        optimizer.load_state_dict({**packed, "state": values, "param_groups": groups})
        for old, new in zip(before, optimizer.param_groups, strict=True):
            for key, tensor in old.items():
                if isinstance(tensor, Tensor):  # compiled code holds on to tensors such as ``lr``
                    new[key] = tensor.copy_(torch.as_tensor(new[key]))
        if exact:
            _restore_dtypes(optimizer, names, state["state"])


def _restore_dtypes(
    optimizer: Optimizer, names: Mapping[Any, str], state: Mapping[str, Any]
) -> None:
    """Put back the tensors that ``load_state_dict`` cast to their parameter's dtype."""
    for param, kept in optimizer.state.items():
        for key, value in state.get(names.get(param, ""), {}).items():
            if key != "step" and isinstance(value, Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device)
