"""Sizes of the axes of ranks, as accelerate's ``parallelism_config`` and axolotl give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from shardkit.fsdp1.configs.reader import RANKS, Reader
from shardkit.fsdp1.configs.target import Ranks
from shardkit.plan import MeshSpec

_OTHERS = {
    "tp": "Tensor parallelism is yours to apply first, on a mesh with a tp axis",
    "cp": "Splitting the sequence is yours, on a mesh with a cp axis",
    "sp": "Splitting the sequence is yours, on a mesh with an sp axis",
    "ep": "Expert parallelism is yours, on a mesh with an ep axis",
}
CONTEXT = "elsewhere: It is for context parallelism, which is yours."


class Axes(NamedTuple):
    """The mesh of data parallelism, None where no size is given or the ranks are unknown; other axes with more ranks
    than one, and their sizes; whether any size other than 1 was given.
    """

    mesh: MeshSpec | None
    others: Mapping[str, int]
    given: bool


def read_axes(
    config: Reader,
    ranks: Ranks,
    names: Mapping[str, str],
    default: Literal["all", "one"],
    context: Reader | None = None,
) -> Axes:
    """The mesh that the sizes of a section make; their product must be the world size.

    Args:
        config: the section.
        ranks: what is known of the world size.
        names: the section's key of each axis.
        default: whether without ``dp_shard`` all ranks that are left shard, or one.
        context: a section whose ``size`` is that of the context axis, where it may have one of its own.

    Context parallel ranks shard the parameters too: each sees a part of every sequence, so their gradients add up.
    """
    asked: dict[str, int | None] = {axis: config.get(key, RANKS) for axis, key in names.items()}
    places = [(config, key, axis) for axis, key in names.items()]
    if context is not None:
        inner = context.get("size", RANKS)
        if inner is not None and asked["cp"] not in (None, inner):
            context.problem("size", f"{inner}, and {names['cp']} {asked['cp']}", "They are the same", "Leave one out")
        asked["cp"] = inner or asked["cp"]
        places.append((context, "size", "cp"))
    sizes = {axis: size for axis, size in asked.items() if size is not None}
    mesh = _mesh(config, ranks, sizes, default) if sizes else None
    for reader, key, axis in places:
        reader.note(key, _answer(axis, sizes.get(axis, 1), mesh))
    config.read({"cp_comm_strategy cp_handler cp_backend sp_handler sp_backend": CONTEXT})
    others = {axis: size for axis, size in sizes.items() if axis in _OTHERS and size > 1}
    return Axes(mesh, others, any(size > 1 for size in sizes.values()))


def _mesh(config: Reader, ranks: Ranks, sizes: Mapping[str, int], default: Literal["all", "one"]) -> MeshSpec | None:
    replicate, context = sizes.get("dp_replicate", 1), sizes.get("cp", 1) * sizes.get("sp", 1)
    beside = sizes.get("tp", 1) * sizes.get("ep", 1)
    world, shard = ranks.world_size, sizes.get("dp_shard")
    if shard is None:
        if default == "all" and world is None:
            return None
        shard = max(1, (world or 1) // (replicate * context * beside)) if default == "all" else 1
    product = replicate * shard * context * beside
    if world is not None and product != world:
        told = ", ".join(f"{axis}={size}" for axis, size in {**sizes, "dp_shard": shard}.items())
        config.problem(
            next(iter(config), "sizes"),
            f"{told} make {product} ranks, and there are {world}",
            "The sizes of the axes multiply to the number of ranks",
            "Change one of them, or the number of ranks",
        )
    return MeshSpec.hybrid(replicate, shard * context) if replicate > 1 else MeshSpec.sharded(shard * context)


def _answer(axis: str, size: int, mesh: MeshSpec | None) -> str:
    if axis not in _OTHERS:
        return f"mapped: {size} on axis {axis}."
    if size == 1:
        return "implied: An axis of one rank is none."
    if axis in ("cp", "sp"):
        return f"noted: {_OTHERS[axis]}; its ranks also shard the parameters. Give shardkit the data-parallel sub-mesh."
    of = f" ({mesh})" if mesh is not None else ""
    return f"noted: {_OTHERS[axis]}. Give shardkit the data-parallel sub-mesh{of}."
