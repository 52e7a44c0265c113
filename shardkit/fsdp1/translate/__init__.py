"""translate_fsdp1 and shard_like_fsdp1: FSDP1's arguments as a plan, with a note for each, and as a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from shardkit.apply.validate import check_unsharded
from shardkit.errors import PlanError, TranslationError, listing, message
from shardkit.fsdp1.translate.arguments import Arguments, Decided, check_precision, check_unwrapped, device_of, notes_on
from shardkit.fsdp1.translate.policy import Ignored, Wrapped, ignored_fqns, ignored_of, wrapped_by
from shardkit.fsdp1.translate.shard import ParamInitFn, Translation, cast_buffers, shard_translated
from shardkit.fsdp1.translate.strategy import RESHARDING, groups_to_agree, parse_strategy, place_of
from shardkit.planning.build import Draft, Settings, plan_of
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.rules import Overrides, Selection
from shardkit.planning.tree import ModelTree, ModuleNode, assign, has_forward

_UNSET = Settings(None, fsdp.MixedPrecisionPolicy(), fsdp.OffloadPolicy(), checkpoint_activations=False, compile=False)


def translate_fsdp1(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    sharding_strategy: fsdp.ShardingStrategy | str | int | None = None,
    cpu_offload: fsdp.CPUOffload | None = None,
    auto_wrap_policy: Any = None,
    backward_prefetch: fsdp.BackwardPrefetch | None = fsdp.BackwardPrefetch.BACKWARD_PRE,
    mixed_precision: fsdp.MixedPrecision | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    param_init_fn: ParamInitFn | None = None,
    device_id: int | torch.device | None = None,
    sync_module_states: bool = False,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    use_orig_params: bool = False,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    device_mesh: DeviceMesh | None = None,
    ranks_per_node: int | None = None,
    world_size: int | None = None,
) -> Translation:
    """Translate ``FullyShardedDataParallel(model, ...)`` to a plan for FSDP2 and a note for each argument.

    Pure and local: the model does not change, and may be on the meta device. Without a process group, pass
    ``world_size`` to plan for a cluster on a laptop. Arguments that are not below are FSDP1's, with its defaults; a
    strategy may also be a name in any case or accelerate's number, and a policy may be a set of module classes.

    Args:
        model: the whole model, not wrapped yet.
        ranks_per_node: ranks that shard together in a hybrid strategy; None is torchrun's ``LOCAL_WORLD_SIZE``.
        world_size: ranks to plan for; None is those of the process group, or torchrun's ``WORLD_SIZE``, or 1.

    Raises:
        TranslationError: FSDP1 would not take an argument either, or FSDP2 does not support it.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> translation = translate_fsdp1(model, sharding_strategy="NO_SHARD", world_size=4)
        >>> str(translation.plan.mesh)
        'dp_replicate=4 x dp_shard=1'
    """
    return translate(model, Arguments.of(locals()))


def shard_like_fsdp1(model: nn.Module, **arguments: Any) -> nn.Module:
    """Shard ``model`` in place with FSDP2 as ``FullyShardedDataParallel(model, **arguments)`` would, and return it.

    The same as ``translate_fsdp1(model, **arguments).apply(model)``, with errors of one rank raised on all. Collective:
    every rank must call it with the same arguments. Build the optimizer afterwards, since sharding replaces the
    parameters. A model on the meta device is initialized as in FSDP1: each unit by ``param_init_fn``, or by
    ``reset_parameters``, right before it is sharded. A model that every rank built under ``init_on_meta`` is
    materialized from its recording instead.

    Args:
        model: the whole model, not wrapped.
        arguments: those of ``translate_fsdp1``: FSDP1's own, ``ranks_per_node`` and ``world_size``.

    Raises:
        TranslationError: with the model unchanged: FSDP1 would not take an argument either, or FSDP2 does not support
            it. Also if ``param_init_fn`` fails, which leaves the model partly sharded.
        PlanError: on every rank, with the model unchanged: ranks disagree, or the plan does not fit one of them; on
            the other ranks where one rank alone raises a TranslationError.
    """
    groups = groups_to_agree(arguments.get("process_group"), arguments.get("device_mesh"))
    translation, _ = shard_translated(model, lambda: translate_fsdp1(model, **arguments), groups)
    cast_buffers(model, translation)
    return model


def translate(model: nn.Module, given: Arguments, apart: Collection[str] = ()) -> Translation:
    """``translate_fsdp1`` for a model of which the drop-in has wrapped ``apart``, FQNs, outermost first."""
    try:
        return _translate(model, given, tuple(apart))
    except PlanError as error:
        raise TranslationError(str(error)) from error


def _translate(model: nn.Module, given: Arguments, apart: tuple[str, ...]) -> Translation:
    tree = ModelTree(model)
    check_unwrapped(tree)
    check_unsharded(tree, given.device_mesh if isinstance(given.device_mesh, DeviceMesh) else None, apart)
    check_precision(given.mixed_precision)
    strategy = parse_strategy(given.sharding_strategy)
    place = place_of(strategy, given.process_group, given.device_mesh, given.ranks_per_node, given.world_size)
    ignored = ignored_of(given.ignored_modules, given.ignored_states)
    wrapped = wrapped_by(tree, given.auto_wrap_policy, given.mixed_precision, ignored, given.for_policies())
    left_alone = set(ignored_fqns(tree, ignored))
    for fqn in apart:
        for node in tree.find(fqn).subtree():
            left_alone.update(node.params)
    settings = _unit_settings(tree, wrapped, given, strategy)
    selections, repairs = _select(tree, wrapped, settings, left_alone)
    draft = Draft(selections, _UNSET, left_alone, tree.unshardable(), notes=repairs)
    draft.prefetch = int(given.forward_prefetch)
    plan = plan_of(tree, place.spec, draft)
    return Translation(
        plan=plan,
        notes=notes_on(Decided(tree, given, strategy, wrapped, ignored, plan)),
        device_mesh=place.device_mesh,
        process_groups=place.groups,
        device=device_of(given.device_id),
        param_init_fn=given.param_init_fn,
        sync_module_states=given.sync_module_states,
        buffer_dtypes=_buffer_dtypes(tree, wrapped, given, ignored),
        ignored_modules=tuple(node.fqn for node in tree.nodes if node.module in ignored.modules),
        wrapped={each.node.fqn: each.arguments for each in wrapped},
        apart=apart,
    )


# --- Units ------------------------------------------------------------------------------------------------------------

# What a CustomPolicy may set for one module: settings of a unit, and settings that FSDP2 does not have.
_OF_A_UNIT = ("sharding_strategy", "mixed_precision", "cpu_offload")
_FSDP2S_OWN = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")


def _innermost(tree: ModelTree, wrapped: Sequence[Wrapped]) -> dict[ModuleNode, Wrapped | None]:
    """Return for each module the innermost wrapped module at or around it, None for the root."""
    own = {each.node: each for each in wrapped}
    found: dict[ModuleNode, Wrapped | None] = {tree.root: None}
    for node in tree.nodes[1:]:
        found[node] = own.get(node, found[node.parents[0]])
    return found


def _precision_of(each: Wrapped | None, given: Arguments) -> fsdp.MixedPrecision | None:
    if each is None or each.full_precision:
        return None if each else given.mixed_precision
    return each.arguments.get("mixed_precision", given.mixed_precision)  # type: ignore[no-any-return]


def _unit_settings(
    tree: ModelTree, wrapped: Sequence[Wrapped], given: Arguments, strategy: fsdp.ShardingStrategy
) -> Callable[[Wrapped | None], Overrides]:
    """Return a function that maps a wrapped module, or None for the root, to the settings of its unit."""
    for each in wrapped:
        _check_own(tree, each, strategy)
    innermost = _innermost(tree, wrapped)

    def settings(each: Wrapped | None) -> Overrides:
        own, policy = each.arguments if each else {}, _mp_policy(_precision_of(each, given), root=each is None)
        if each and each.full_precision:
            policy = _full_precision(_precision_of(innermost[each.node.parents[0]], given))
        return Overrides(
            # FSDP1 never reshards its root after forward, since backward needs it at once.
            reshard_after_forward=each is not None
            and parse_strategy(own.get("sharding_strategy", strategy)).name in RESHARDING,
            mp_policy=policy,
            offload_policy=_offload_policy(own.get("cpu_offload", given.cpu_offload), device_of(given.device_id)),
        )

    return settings


# By the name of a strategy the kind of its mesh.
_AXES = {"FULL_SHARD": 1, "SHARD_GRAD_OP": 1, "NO_SHARD": 0, "HYBRID_SHARD": 2, "_HYBRID_SHARD_ZERO2": 2}


def _check_own(tree: ModelTree, each: Wrapped, strategy: fsdp.ShardingStrategy) -> None:
    others = [name for name in each.arguments if name not in (*_OF_A_UNIT, *_FSDP2S_OWN)]
    fqn, rule = each.node.fqn, "Only reshard_after_forward and the policies can differ between units of a plan"
    if others:
        problem = f"sets {listing(others)} for {fqn} alone"
        raise TranslationError(message("auto_wrap_policy", problem, rule, "Pass it for the whole model"))
    other = parse_strategy(each.arguments.get("sharding_strategy", strategy))
    if _AXES[other.name] != _AXES[strategy.name]:
        problem = f"sets {other.name} for {fqn} in {strategy.name}"
        fix = "Use strategies of one mesh, or call fully_shard on these modules with a mesh of their own"
        raise TranslationError(message("auto_wrap_policy", problem, rule, fix))


def _mp_policy(mixed_precision: fsdp.MixedPrecision | None, *, root: bool) -> fsdp.MixedPrecisionPolicy:
    """FSDP1 reduces in ``param_dtype`` if ``reduce_dtype`` is None, which FSDP2 does not since torch 2.15."""
    if mixed_precision is None or mixed_precision.param_dtype is None:
        return fsdp.MixedPrecisionPolicy(reduce_dtype=mixed_precision.reduce_dtype if mixed_precision else None)
    return fsdp.MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype or mixed_precision.param_dtype,
        cast_forward_inputs=casts_inputs(mixed_precision, root),
    )


def casts_inputs(mixed_precision: fsdp.MixedPrecision, root: bool) -> bool:
    """Return whether FSDP1 casts inputs: those of the root only, unless cast_forward_inputs is set."""
    return bool(mixed_precision.cast_forward_inputs or (root and mixed_precision.cast_root_forward_inputs))


def _full_precision(around: fsdp.MixedPrecision | None) -> fsdp.MixedPrecisionPolicy:
    """For BatchNorm: cast inputs to float32 and outputs back, as hooks of FSDP1 did."""
    if around is None or around.param_dtype in (None, torch.float32):
        return fsdp.MixedPrecisionPolicy()
    return fsdp.MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=around.param_dtype)


def _offload_policy(cpu_offload: fsdp.CPUOffload | None, device: torch.device | None) -> fsdp.OffloadPolicy:
    """Memory is pinned only for an accelerator; without one pinning raises."""
    if cpu_offload is None or not cpu_offload.offload_params:
        return fsdp.OffloadPolicy()
    on_accelerator = torch.accelerator.is_available() and (device is None or device.type != "cpu")
    return fsdp.CPUOffloadPolicy(pin_memory=on_accelerator)


def _buffer_dtypes(
    tree: ModelTree, wrapped: list[Wrapped], given: Arguments, ignored: Ignored
) -> dict[str, torch.dtype]:
    """Return what FSDP1 casts each floating-point buffer to at the first forward, by its first FQN.

    A buffer follows the innermost unit around it; buffers of ignored modules keep their dtype.
    """
    found: dict[str, torch.dtype] = {}
    seen: set[int] = set()
    for node, each in _innermost(tree, wrapped).items():
        fqn, module = node.fqn, node.module
        precision = None if module in ignored.modules else _precision_of(each, given)
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in seen and precision and precision.buffer_dtype and buffer.is_floating_point():
                found[f"{fqn}.{name}".lstrip(".")] = precision.buffer_dtype
            seen.add(id(buffer))
    return found


def _select(
    tree: ModelTree, wrapped: list[Wrapped], settings: Callable[[Wrapped | None], Overrides], ignored: set[str]
) -> tuple[list[Selection], list[str]]:
    """Return the selections for FSDP1's choice and the root, and a note for each difference in FSDP2."""
    # FSDP1 wraps a ModuleList with a warning and never gathers it, since it is never called.
    called = [each for each in wrapped if has_forward(each.node.module)]
    uncalled = listing((each.node.fqn for each in wrapped if each not in called), 6)
    notes = [f"{uncalled}: has no forward, so the unit around it gathers its parameters"] if uncalled else []
    selections = [Selection((each.node,), settings(each)) for each in called]
    selections.append(Selection((tree.root,), settings(None), reshard=False))
    selections, tie_notes = join_ties(tree, selections, ignored)
    for names in (listing(node.fqn for node in each.modules) for each in selections if len(each.modules) > 1):
        notes.append(f"{names}: share a parameter, so are one unit; FSDP1 gathered it for the first of them only")
    selections, _, dtype_notes = split_dtypes(tree, selections, ignored)
    selections, empty_notes = _without_params(tree, selections, ignored)
    return selections, notes + tie_notes + dtype_notes + empty_notes


def _without_params(
    tree: ModelTree, selections: list[Selection], ignored: set[str]
) -> tuple[list[Selection], list[str]]:
    """Drop units without parameters, which have no effect in FSDP1, but keep those that cast their outputs."""
    params, _ = assign(tree, [selection.modules for selection in selections], ignored)
    empty = [
        selection
        for selection, owned in zip(selections, params, strict=True)
        if not owned and selection.modules != (tree.root,) and selection.overrides["mp_policy"].output_dtype is None
    ]
    names = listing((node.fqn for each in empty for node in each.modules), 4)
    kept = [selection for selection in selections if selection not in empty]
    return kept, [f"{names}: wrapped by FSDP1 and without parameters of its own, so not a unit"] if empty else []
