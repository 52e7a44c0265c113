"""The parts of a plan, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError


def is_world_size(reshard_after_forward: bool | int) -> bool:
    """Return whether ``reshard_after_forward`` is a number of ranks; in Python
    ``isinstance(True, int)`` holds.
    """
    return isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)


def ancestors(fqn: str) -> list[str]:
    """Return the FQNs of the modules around ``fqn``, innermost first, the root ``""`` last; none
    for the root.
    """
    parts = fqn.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, -1, -1)] if fqn else []


def count(elements: int) -> str:
    """Format a number of elements: ``8.03 B``, ``218.1 M``, ``1,024``."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if elements >= 10 * size or (elements >= size and size > 1000):
            return f"{elements / size:.4g} {unit}"
    return f"{elements:,}"


def nbytes(size: float) -> str:
    """Format bytes in powers of 1024: ``29.9 GiB``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.1f} {unit}"
    return f"{size:.0f} B"


@dataclass
class Collectives:
    """The collectives of a step on each rank: ``plan.collectives()`` predicts,
    ``testing.comm_counts()`` counts.
    """

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0
    all_to_alls: int = 0


class ParamSpec(NamedTuple):
    """What a plan records about one parameter.

    Attributes:
        fqn: its name in ``model.named_parameters()``.
        shape: its unsharded shape, in elements.
        dtype: the dtype it is stored and optimized in.
        trainable: its ``requires_grad``.
        aliases: the further FQNs under which a tied parameter is registered.
        tensor_parallel: whether it was a DTensor before sharding, on another axis of the mesh.
        element_bytes: of a frozen parameter whose class stores it in another form, such as NF4: the
            bytes that it holds for each element, unsharded or not; 0.0 for those of ``dtype``.
        part: where the model has split it, as by tensor parallelism, the shape of the largest part,
            which is what FSDP2 shards; else empty.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    tensor_parallel: bool = False
    element_bytes: float = 0.0
    part: tuple[int, ...] = ()

    @property
    def local(self) -> ParamSpec:
        """The same of what a rank has before FSDP2 shards: the largest part, or all of it."""
        return self._replace(shape=self.part) if self.part else self

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    @property
    def shards(self) -> bool:
        """Whether FSDP2 can shard it: it has a dim and an element."""
        return bool(self.shape) and 0 not in self.shape

    def shard_numel(self, ranks: int, dim: int = 0) -> int:
        """Elements of the largest of its shards on ``dim``, that of rank 0: torch splits like
        torch.chunk.
        """
        size = self.shape[dim] if self.shape else 1
        return -(-size // ranks) * (self.numel // size) if size else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameter, as it is stored."""
        return self.nbytes_of(self.numel)

    def nbytes_of(self, numel: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of ``numel`` of its elements, in ``dtype`` or as stored; ``dtype`` does not cast
        quantized classes.
        """
        return (
            round(numel * self.element_bytes)
            if self.element_bytes
            else numel * (dtype or self.dtype).itemsize
        )


@dataclass(frozen=True)
class MeshSpec:
    """Shape and axis names of a device mesh, in ranks; needs no process group.

    One axis shards (FSDP). Two axes replicate over the first and shard over the second (HSDP),
    torch's own order; ``(n, 1)`` replicates only, like DDP. Of more axes the first replicates, and
    the others shard as if they were one. ``shard_axes`` says how many of the last axes shard, where
    it is another number: on ``("efsdp", "ep")`` both do once a rule shards experts on ``"efsdp"``
    alone.

    Examples:
        >>> MeshSpec.hybrid(2, 4).size
        8
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    shard_axes: int = 0  # 0 is all but the first, or the only one

    def __post_init__(self) -> None:
        axes = len(self.shape)
        object.__setattr__(self, "shard_axes", self.shard_axes or max(1, axes - 1))
        names_fit = axes == len(self.axis_names) == len(set(self.axis_names))
        sizes_fit = all(isinstance(size, int) and size >= 1 for size in self.shape)
        if not (axes and names_fit and sizes_fit and axes - self.shard_axes in (0, 1)):
            raise PlanError(
                f"mesh has the shape {self.shape} with axis names {self.axis_names}, of which "
                f"{self.shard_axes} shard. A mesh has axes of at least one rank, each with a name "
                "of its own, and all but at most one shard. Use MeshSpec.sharded(ranks) or "
                "MeshSpec.hybrid(replicate, shard)."
            )

    @classmethod
    def sharded(cls, ranks: int) -> MeshSpec:
        """Shard over all ``ranks``: FSDP."""
        return cls((ranks,), ("dp_shard",))

    @classmethod
    def hybrid(cls, replicate: int, shard: int) -> MeshSpec:
        """Replicate ``replicate`` times, each replica sharded over ``shard`` ranks: HSDP."""
        return cls((replicate, shard), ("dp_replicate", "dp_shard"))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def shard_size(self) -> int:
        """The number of ranks over which each parameter is sharded."""
        return math.prod(self.shape[-self.shard_axes :])

    @property
    def replicates(self) -> bool:
        """Whether there is a replicate axis, so that gradients are all-reduced over it."""
        return len(self.shape) > self.shard_axes

    def sharded_from(self, axis: str) -> MeshSpec:
        """Return the mesh of which ``axis`` and all after it shard; PlanError if it is not one of
        the first two.
        """
        if axis not in self.axis_names[:2]:
            raise PlanError(
                f"mesh of a rule must be one of the first two axes of {self}, got {axis!r}. At "
                "most one axis, which replicates, comes before it; the experts are split over "
                'those after it. Pass mesh=init_device_mesh(..., mesh_dim_names=("dp_replicate", '
                '"efsdp", "ep")).'
            )
        return replace(self, shard_axes=len(self.shape) - self.axis_names.index(axis))

    def on(self, axis: str | None) -> MeshSpec:
        """Return the mesh of one or two axes for a unit sharded on ``axis``, the first that shards;
        None is on all.
        """
        if axis is None and self.shard_axes == 1:
            return self
        cut = len(self.shape) - self.shard_axes
        shards = self.axis_names[cut:]
        if axis not in (None, shards[0]):
            raise PlanError(
                f"mesh of a unit must be None, for all axes that shard, or {shards[0]!r} of "
                f"{self}, got {axis!r}."
            )
        size = self.shard_size if axis is None else self.shape[cut]
        return MeshSpec(
            (*self.shape[:cut], size), (*self.axis_names[:cut], axis or "_".join(shards)), 1
        )

    def splits(self, axis: str | None) -> dict[str, int]:
        """Return the axes, with their sizes, over which the model has split the experts of a unit
        on ``axis``.
        """
        if axis is None:
            return {}
        cut = self.axis_names.index(axis) + 1
        return dict(zip(self.axis_names[cut:], self.shape[cut:], strict=True))

    def parts(self, axis: str | None) -> int:
        """Return into how many parts the model has split each parameter of a unit on ``axis``; 1
        for None.
        """
        return math.prod(self.splits(axis).values())

    def __str__(self) -> str:
        axes = zip(self.axis_names, self.shape, strict=True)
        return " x ".join(f"{name}={size}" for name, size in axes)


@dataclass(frozen=True)
class ShardUnit:
    """One future ``fully_shard`` call: the modules that share one all-gather.

    Attributes:
        modules: FQNs, ``""`` is the root; more than one is torch's list form,
            ``fully_shard([a, b])``.
        params: FQNs of the parameters this call will own, in torch's order; a tied one once.
        reshard_after_forward: resolved, never None; an int is the number of ranks to reshard to.
        mp_policy: torch's own class; in a plan, ``reduce_dtype=None`` beside a ``param_dtype``
            becomes the dtype of the unit's trainable parameters.
        offload_policy: torch's own class.
        checkpoint_activations: recompute the forward of each module in backward;
            ``"selective"`` keeps attention and every other matrix product, ``"module:function"``
            what that policy keeps.
        compile: compile the forward of each module, after checkpointing and before sharding.
        blocks: ``modules`` where the whole model's choice of these two applies to the unit, a
            module with submodules; else empty, and only a rule of its own can ask for them.
        shard_dims: the parameters that are not sharded on dim 0, as pairs ``(fqn, dim)`` in the
            order of ``params``; a mapping is converted. The shard axis must divide their sizes.
        mesh: the axis that this unit is sharded on, where not on all that shard: experts that the
            model has split over the axes after it. None is all.
        may_skip: ranks may call the module or not; those that do not take part in its collectives.
        float32: each module casts its inputs in bf16 or fp16 to float32 itself, and its outputs
            back.
    """

    modules: tuple[str, ...]
    params: tuple[str, ...]
    reshard_after_forward: bool | int = True
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    checkpoint_activations: bool | str = False
    compile: bool = False
    blocks: tuple[str, ...] = ()
    shard_dims: tuple[tuple[str, int], ...] = ()
    mesh: str | None = None
    may_skip: bool = False
    float32: bool = False

    def __post_init__(self) -> None:
        if self.shard_dims != ():  # pairs, or a mapping
            dims = dict(self.shard_dims)
            ordered = {fqn: dims[fqn] for fqn in (*self.params, *dims) if dims.get(fqn)}
            object.__setattr__(self, "shard_dims", tuple(ordered.items()))

    def __hash__(self) -> int:
        return hash((self.modules, self.params))  # torch's OffloadPolicy is not hashable

    @property
    def name(self) -> str:
        """The unit as tables and errors call it."""
        names = [fqn or "(root)" for fqn in self.modules]
        return names[0] if len(names) == 1 else f"[{', '.join(names)}]"

    @property
    def offloads(self) -> bool:
        """Whether its shards, gradients and optimizer state live on the CPU."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)
