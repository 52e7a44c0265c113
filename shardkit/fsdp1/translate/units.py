"""Make units of FSDP2 from the modules that FSDP1 would wrap, with their settings and a note for each difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.translate.arguments import Arguments, check_arguments, device_of
from shardkit.fsdp1.translate.policy import Ignored, Wrapped
from shardkit.fsdp1.translate.strategy import RESHARDING, parse_strategy
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.rules import Overrides, Selection, has_forward
from shardkit.planning.tree import ModelTree, assign

# What a CustomPolicy may set for one module: settings of a unit, and settings that FSDP2 does not have.
_OF_A_UNIT = ("sharding_strategy", "mixed_precision", "cpu_offload")
_FSDP2S_OWN = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")


def unit_settings(
    tree: ModelTree, wrapped: Sequence[Wrapped], given: Arguments, strategy: ShardingStrategy
) -> Callable[[Wrapped | None], Overrides]:
    """Return a function that maps a wrapped module, or None for the root, to the settings of its unit.

    Raises:
        TranslationError: a CustomPolicy sets for one module what only the whole model can have in FSDP2.
    """
    for each in wrapped:
        _check_own(tree, each, strategy)
    by_entry = {each.entry: each for each in wrapped}

    def precision(entry: int) -> MixedPrecision | None:
        """Return that of the innermost unit at or around ``entry`` that does not run in full precision."""
        while entry > 0:
            if entry in by_entry and not by_entry[entry].full_precision:
                return by_entry[entry].arguments.get("mixed_precision", given.mixed_precision)  # type: ignore[no-any-return]
            entry = tree.parents[entry]
        return given.mixed_precision  # type: ignore[no-any-return]

    def settings(each: Wrapped | None) -> Overrides:
        own = each.arguments if each else {}
        around = precision(each.entry if each else 0)
        full = each is not None and each.full_precision
        return Overrides(
            # FSDP1 never reshards its root after forward, since backward needs it at once.
            reshard_after_forward=each is not None
            and parse_strategy(own.get("sharding_strategy", strategy)).name in RESHARDING,
            mp_policy=_full_precision(around) if full else _mp_policy(around, root=each is None),
            offload_policy=_offload_policy(own.get("cpu_offload", given.cpu_offload), device_of(given.device_id)),
        )

    return settings


def _axes(strategy: Any) -> str:
    """Return the kind of mesh of a strategy."""
    name = parse_strategy(strategy).name
    return "hybrid" if "HYBRID" in name else "none" if name == "NO_SHARD" else "full"


def _check_own(tree: ModelTree, each: Wrapped, strategy: ShardingStrategy) -> None:
    own = {name: value for name, value in each.arguments.items() if name in (*_OF_A_UNIT, *_FSDP2S_OWN)}
    others = [name for name in each.arguments if name not in own]
    fqn, rule = tree.fqns[each.entry], "Only reshard_after_forward and the policies can differ between units of a plan"
    if others:
        problem = f"sets {listing(others)} for {fqn} alone"
        raise TranslationError(message("auto_wrap_policy", problem, rule, "Pass it for the whole model"))
    check_arguments(Arguments(**own))
    if _axes(own.get("sharding_strategy", strategy)) != _axes(strategy):
        problem = f"sets {parse_strategy(own['sharding_strategy']).name} for {fqn} in {strategy.name}"
        fix = "Use strategies of one mesh, or call fully_shard on these modules with a mesh of their own"
        raise TranslationError(message("auto_wrap_policy", problem, rule, fix))


def _mp_policy(mixed_precision: MixedPrecision | None, *, root: bool) -> MixedPrecisionPolicy:
    """FSDP1 reduces in ``param_dtype`` if ``reduce_dtype`` is None, which FSDP2 does not since torch 2.15."""
    if mixed_precision is None or mixed_precision.param_dtype is None:
        return MixedPrecisionPolicy(reduce_dtype=mixed_precision.reduce_dtype if mixed_precision else None)
    return MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype or mixed_precision.param_dtype,
        cast_forward_inputs=casts_inputs(mixed_precision, root),
    )


def casts_inputs(mixed_precision: MixedPrecision, root: bool) -> bool:
    """Return whether FSDP1 casts inputs: those of the root only, unless cast_forward_inputs is set."""
    return bool(mixed_precision.cast_forward_inputs or (root and mixed_precision.cast_root_forward_inputs))


def _full_precision(around: MixedPrecision | None) -> MixedPrecisionPolicy:
    """For BatchNorm: inputs are cast to float32 and outputs back, by hooks in FSDP1 and by the policy in FSDP2."""
    if around is None or around.param_dtype in (None, torch.float32):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=around.param_dtype)


def _offload_policy(cpu_offload: CPUOffload | None, device: torch.device | None) -> OffloadPolicy:
    """Memory is pinned only for an accelerator; without one pinning raises."""
    if cpu_offload is None or not cpu_offload.offload_params:
        return OffloadPolicy()
    on_accelerator = torch.accelerator.is_available() and (device is None or device.type != "cpu")
    return CPUOffloadPolicy(pin_memory=on_accelerator)


def buffer_dtypes(
    tree: ModelTree, wrapped: list[Wrapped], mixed_precision: MixedPrecision | None, ignored: Ignored
) -> dict[str, torch.dtype]:
    """Return what FSDP1 casts each floating-point buffer to at the first forward, by its first FQN.

    A buffer follows the innermost unit around it; buffers of ignored modules keep their dtype.
    """
    own = {each.entry: each for each in wrapped}
    around: list[MixedPrecision | None] = []
    found: dict[str, torch.dtype] = {}
    seen: set[int] = set()
    for entry, module in enumerate(tree.modules):
        precision = around[tree.parents[entry]] if entry else mixed_precision
        if entry in own:
            precision = (
                None if own[entry].full_precision else own[entry].arguments.get("mixed_precision", mixed_precision)
            )
        around.append(precision)
        dtype = precision.buffer_dtype if precision is not None and module not in ignored.modules else None
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in seen and dtype is not None and buffer.is_floating_point():
                found[f"{tree.fqns[entry]}.{name}".lstrip(".")] = dtype
            seen.add(id(buffer))
    return found


def select_wrapped(
    tree: ModelTree, wrapped: list[Wrapped], settings: Callable[[Wrapped | None], Overrides], ignored: frozenset[str]
) -> tuple[list[Selection], list[str]]:
    """Return the selections for FSDP1's choice and the root, and a note for each difference in FSDP2.

    Args:
        tree: the model.
        wrapped: FSDP1's choice below the root.
        settings: the settings of a unit; of the root for None.
        ignored: FQNs of parameters that no unit owns.
    """
    # FSDP1 wraps a ModuleList with a warning and never gathers it, since it is never called.
    called = [each for each in wrapped if has_forward(tree.modules[each.entry])]
    uncalled = listing((tree.fqns[each.entry] for each in wrapped if each not in called), 6)
    notes = [f"{uncalled}: has no forward, so the unit around it gathers its parameters"] if uncalled else []
    selections = [Selection((each.entry,), settings(each)) for each in called]
    selections.append(Selection((0,), settings(None), reshard=False))
    selections, tie_notes = join_ties(tree, selections, ignored)
    for names in (listing(tree.fqns[entry] for entry in each.entries) for each in selections if len(each.entries) > 1):
        notes.append(f"{names}: share a parameter, so are one unit; FSDP1 gathered it for the first of them only")
    selections, dtype_notes = split_dtypes(tree, selections, ignored)
    selections, empty_notes = _without_params(tree, selections, ignored)
    return selections, notes + tie_notes + dtype_notes + empty_notes


def _without_params(
    tree: ModelTree, selections: list[Selection], ignored: frozenset[str]
) -> tuple[list[Selection], list[str]]:
    """Drop units without parameters, which have no effect in FSDP1, but keep those that cast their outputs."""
    params = assign(tree, [selection.entries for selection in selections], ignored).params
    empty = [
        selection
        for selection, owned in zip(selections, params, strict=True)
        if not owned and selection.entries != (0,) and selection.overrides["mp_policy"].output_dtype is None
    ]
    names = listing((tree.fqns[entry] for each in empty for entry in each.entries), 4)
    kept = [selection for selection in selections if selection not in empty]
    return kept, [f"{names}: wrapped by FSDP1 and without parameters of its own, so not a unit"] if empty else []
