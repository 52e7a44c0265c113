"""materialize: give each rank its shards of the values that ordinary construction would have had."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit._fsdp.params import tensor_hooks
from shardkit.errors import ShardkitError, listing, message
from shardkit.held import held_tensors
from shardkit.meta.consensus import agree, digest_of
from shardkit.meta.context import is_plain_meta, is_recorded, records
from shardkit.meta.own import Initialiser, Recorded, record_initialisers
from shardkit.meta.replay import Player
from shardkit.meta.rng import settle, undone_on_error
from shardkit.meta.schedule import Final
from shardkit.meta.shards import Cutter, Target, install
from shardkit.meta.tape import Tape, closure, find_storage, view_of
from shardkit.meta.undefined import Definedness
from shardkit.shards import local_value


def materialize(
    model: nn.Module,
    device: torch.device | str | None = None,
    seed: int | None = None,
    *,
    init: Initialiser | None = None,
) -> nn.Module:
    """Give a sharded meta model its values: those that ordinary construction would have had, bit for bit.

    Every meta parameter and buffer (persistent or not), and every meta tensor that a module holds elsewhere (in
    attributes, lists, closures, modules that are not registered), gets this rank's part of the value that the same
    code would have computed without ``init_on_meta``. Parameters stay the same objects, with their ``requires_grad``,
    ties, attributes and post-accumulate hooks. Real tensors are left alone.
    In place. Each rank replays the whole construction and keeps its shards, so it costs about one construction
    in time, and about one largest full tensor in host memory beyond the shards.

    **Collective: every rank of the model's meshes must call.** It communicates only once, three numbers for each
    mesh axis, to check that all ranks are to make the same model.

    Args:
        model: sharded with ``shard_model``, ``apply_plan`` or torch's ``fully_shard``, before its first forward.
        device: where the values are computed. None is where the model was built, the CPU as a rule. ``"cuda"``
            is faster, and equals construction on that device, whose generators draw other numbers. The shards
            end up on their mesh's device, or on the CPU when they are offloaded, whatever this is.
        seed: values as after ``torch.manual_seed(seed)``. None: as in the state that torch's generator had when
            ``init_on_meta`` was entered. Python's and numpy's random numbers were drawn during ``init_on_meta``.
        init: called with each module, children first, as ``model.apply(init)`` right after construction, with
            full-size parameters to write to in place (recorded, so no memory is used for them). What it does not
            write keeps the constructed value.

    A model that was built under ``torch.device("meta")`` has no recording. Without ``init`` it gets what its own
    ``reset_parameters`` methods, then ``init_weights`` or ``_init_weights`` (as in transformers), compute.

    torch's default generator ends where ordinary construction leaves it, unless someone drew from it or seeded it
    since ``init_on_meta`` and no ``seed`` was given; then it is left alone.

    Returns:
        the model.

    Raises:
        ShardkitError: the model is not sharded, or not on meta (any more); ranks have different seeds or different
            constructions; values would stay undefined. Nothing was changed.

    Example::

        with init_on_meta():
            model = Transformer(config)
        shard_model(model)
        materialize(model)
    """
    _check_model(model)
    targets = find_targets(model)
    problem, replay = None, None
    with undone_on_error():
        try:
            tapes = resolve(model, targets, init, chained=seed is None)
            replay = player_of(model, targets, tapes, device, seed)
            digest = digest_of(tapes, targets, seed)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            problem, digest = error, 0
        agree(model, digest, problem)
    assert replay is not None
    replay.run()
    install(model, targets)
    settle(tapes, replay.ends, replay.device, seeded=seed is not None)
    for module in model.modules():
        records.pop(module, None)
    return model


# ---- what is to be made ---------------------------------------------------------------------------------------


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ShardkitError(
            message("model", f"a {type(model).__name__} is no nn.Module", "materialize takes a sharded model", "")
        )
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ShardkitError(
            message(
                "model",
                "no module of it is sharded",
                "materialize makes only this rank's shards, so it needs to know them",
                "Call shard_model(model) or fully_shard first",
            )
        )
    if not find_targets(model):
        raise ShardkitError(
            message(
                "model",
                "none of its parameters and buffers is on the meta device",
                "materialize is called once, on a model that was built under init_on_meta() or torch.device('meta')",
                "Leave the call out if the model has its values already",
            )
        )


def is_on_meta(tensor: Tensor) -> bool:
    """Whether a tensor, sharded or not, has no memory."""
    return tensor.device.type == "meta"


def find_targets(model: nn.Module, chosen: Callable[[Tensor], bool] = is_on_meta) -> list[Target]:
    """The chosen parameters and buffers, and the meta tensors that modules hold elsewhere, each once. Local, pure."""
    found: dict[int, Target] = {}
    for path, module in model.named_modules():
        prefix = path + "." if path else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and chosen(tensor):
                target = found.setdefault(id(tensor), Target(tensor))
                target.fqns.append(prefix + name)
                target.slots.append((module, name))
    for each in held_tensors(model):
        if is_plain_meta(each.tensor):
            target = found.setdefault(id(each.tensor), Target(each.tensor))
            target.fqns = target.fqns or [f"{each.name} (an attribute)"]
            target.places += [each.put] if each.put is not None else []
    return list(found.values())


def resolve(model: nn.Module, targets: list[Target], init: Initialiser | None, *, chained: bool) -> list[Tape]:
    """Find what was recorded for each target, record what was not, and return the tapes to replay."""
    for target in targets:
        target.recorded = _recorded(target)
    missing = {id(t.tensor) for t in targets if t.recorded is None and t.slots}
    if missing and init is None and is_recorded(model):
        _refuse_to_guess([target for target in targets if id(target.tensor) in missing])
    if missing or init is not None:
        known = {id(t.tensor): t.recorded for t in targets if t.recorded is not None}
        recorded = record_initialisers(model, known, missing, init)
        for target in targets:
            target.recorded = recorded.get(id(target.tensor), target.recorded)
    tapes = closure({t.recorded[0] for t in targets if t.recorded is not None}, chained=chained)
    _check_targets(targets, tapes)
    return tapes


def _refuse_to_guess(targets: list[Target]) -> None:
    # PEFT's adapters, put on after init_on_meta: reset_parameters of their nn.Linear would not give zeros to lora_B.
    raise ShardkitError(
        message(
            listing(fqn for target in targets for fqn in target.fqns),
            "made on the meta device outside init_on_meta(), so its initial values were not recorded",
            "The rest of the model was recorded, and materialize does not guess values",
            "Make it inside init_on_meta() too (get_peft_model as well), or pass materialize(model, init=...)",
        )
    )


def _recorded(target: Target) -> Recorded | None:
    """What the tape knows of a tensor: by its storage, or by its places in modules where it has a new one."""
    if is_plain_meta(target.tensor):
        found = find_storage(target.tensor)
        if found is not None:
            return found[0], view_of(target.tensor, found[1])
    by_place = [records[module][name] for module, name in target.slots if name in records.get(module, {})]
    if any(record != by_place[0] for record in by_place):
        raise ShardkitError(
            message(
                target.fqns[0],
                f"it was tied to {listing(target.fqns[1:])} after init_on_meta",
                "Each of them was recorded with a value of its own",
                "Tie them inside init_on_meta()",
            )
        )
    return by_place[0] if by_place else None


def _check_targets(targets: list[Target], tapes: list[Tape]) -> None:
    if quantised := [fqn for t in targets if _torch.is_wrapper(local_value(t.tensor)) for fqn in t.fqns]:
        rule = "Initial values are plain, and what is inside of this class is not"
        raise ShardkitError(message(listing(quantised), "quantised on meta", rule, "Quantise after materialize"))
    is_defined = Definedness(tapes)
    undefined = [t for t in targets if t.recorded is None or not is_defined(t.recorded[1])]
    if undefined:
        raise ShardkitError(
            message(
                listing((fqn for t in undefined for fqn in t.fqns), most=len(undefined) + 1000),
                "would stay uninitialised: neither the construction nor an initialiser of the model writes all of it",
                "materialize leaves no memory undefined",
                "Build the model under init_on_meta(), or pass materialize(model, init=...), which writes them",
            )
        )
    _check_held(targets)
    changed = [t for t in targets if t.recorded is not None and t.recorded[1].size != tuple(t.tensor.shape)]
    if changed:
        raise ShardkitError(
            message(
                listing(fqn for t in changed for fqn in t.fqns),
                "the shape is not the one that was recorded",
                "What computes initial values, and their shapes, belongs inside init_on_meta()",
                "Move the change there",
            )
        )
    check_unbound(targets)


def _check_held(targets: list[Target]) -> None:
    """Raise if a parameter from before ``fully_shard`` is held: it would get values of its own, and never train."""
    held = [t for t in targets if not t.slots and isinstance(t.tensor, nn.Parameter)]
    registered = [t.recorded for t in targets if t.slots] if held else []
    stale = [t for t in held if t.recorded in registered]
    if stale:
        raise ShardkitError(
            message(
                listing(fqn for t in stale for fqn in t.fqns),
                "is a parameter that fully_shard has replaced in its module",
                "It would stay a full tensor that does not train",
                "Shard with shard_model, which keeps such places up to date, or drop it before sharding",
            )
        )


def check_unbound(targets: list[Target]) -> None:
    """Raise if ``install`` would lose a gradient hook, or be refused because of a weak reference."""
    referenced = [t for t in targets if isinstance(t.tensor, DTensor) and _is_bound(t.tensor)]
    if referenced:
        raise ShardkitError(
            message(
                listing(fqn for t in referenced for fqn in t.fqns),
                "it has a gradient hook, or something holds a weak reference to it",
                "torch.utils.swap_tensors, which gives a tensor object its value, loses the one and refuses the other",
                "Make it after materialize",
            )
        )


def _is_bound(tensor: Tensor) -> bool:
    return bool(weakref.getweakrefs(tensor) or tensor_hooks(tensor))


def player_of(
    model: nn.Module,
    targets: list[Target],
    tapes: list[Tape],
    device: torch.device | str | None,
    seed: int | None,
    *,
    draw_all: bool = True,
) -> Player:
    """What plays the tapes and cuts the targets' values from it; see :class:`Player`. Local."""
    cutter = Cutter(model)
    finals = [Final(target.view, partial(cutter.cut, target)) for target in targets]
    player = Player(tapes, finals, device=torch.device(device or tapes[-1].device), seed=seed, draw_all=draw_all)
    if player.stale:
        raise ShardkitError(
            message(
                "model",
                f"{len(player.stale)} real tensors that init_on_meta recorded as constants were changed since",
                "They must stay as they were until materialize",
                "Clone what you want to change",
            )
        )
    return player
