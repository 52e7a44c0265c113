"""The settings of each unit: the root's arguments, and what a CustomPolicy gives for a module instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.translate.arguments import Arguments, check_arguments, device_of
from shardkit.fsdp1.translate.policy import Wrapped
from shardkit.fsdp1.translate.precision import full_precision_policy, mp_policy, offload_policy
from shardkit.fsdp1.translate.strategy import parse_strategy
from shardkit.planning.rules import Overrides
from shardkit.planning.tree import ModelTree

# What a CustomPolicy may give for one module: the settings of a unit, and what FSDP2 does its own way anyway.
_OF_A_UNIT = ("sharding_strategy", "mixed_precision", "cpu_offload")
_FSDP2S_OWN = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")


def unit_settings(
    tree: ModelTree, wrapped: Sequence[Wrapped], given: Arguments, strategy: ShardingStrategy
) -> Callable[[Wrapped | None], Overrides]:
    """A function from a wrapped module, or None for the root, to the settings of its unit.

    Raises:
        TranslationError: a CustomPolicy gives a module what FSDP2 can only have for the whole model.
    """
    for each in wrapped:
        _check_own(tree, each, strategy)
    by_entry = {each.entry: each for each in wrapped}

    def precision(entry: int) -> MixedPrecision | None:
        """That of the innermost unit at or around ``entry`` which does not run in full precision."""
        while entry > 0:
            if entry in by_entry and not by_entry[entry].full_precision:
                return by_entry[entry].arguments.get("mixed_precision", given.mixed_precision)  # type: ignore[no-any-return]
            entry = tree.parents[entry]
        return given.mixed_precision  # type: ignore[no-any-return]

    def settings(each: Wrapped | None) -> Overrides:
        own = each.arguments if each else {}
        around = precision(each.entry if each else 0)
        offload: CPUOffload | None = own.get("cpu_offload", given.cpu_offload)
        full = each is not None and each.full_precision
        return Overrides(
            # FSDP1 never reshards its root after forward, since backward needs it at once.
            reshard_after_forward=each is not None and _reshards(own.get("sharding_strategy", strategy)),
            mp_policy=full_precision_policy(around) if full else mp_policy(around, root=each is None),
            offload_policy=offload_policy(offload, device_of(given.device_id)),
        )

    return settings


def _reshards(strategy: Any) -> bool:
    return parse_strategy(strategy).name in ("FULL_SHARD", "HYBRID_SHARD")


def _axes(strategy: Any) -> str:
    """Strategies of one kind shard on the same mesh."""
    name = parse_strategy(strategy).name
    return "hybrid" if "HYBRID" in name else "none" if name == "NO_SHARD" else "full"


def _check_own(tree: ModelTree, each: Wrapped, strategy: ShardingStrategy) -> None:
    rule = "A plan has one mesh, one device and one way of initialising; a unit has reshard_after_forward and policies"
    own = {name: value for name, value in each.arguments.items() if name in (*_OF_A_UNIT, *_FSDP2S_OWN)}
    others = [name for name in each.arguments if name not in own]
    if others:
        raise TranslationError(
            message("auto_wrap_policy", f"{listing(others)} for {tree.fqns[each.entry]} alone", rule, "Give it to all")
        )
    check_arguments(Arguments(**own))
    if _axes(own.get("sharding_strategy", strategy)) != _axes(strategy):
        raise TranslationError(
            message(
                "auto_wrap_policy",
                f"{parse_strategy(own['sharding_strategy']).name} for {tree.fqns[each.entry]} in {strategy.name}",
                rule,
                "Use strategies of one mesh, or call fully_shard on these modules with a mesh of their own",
            )
        )
