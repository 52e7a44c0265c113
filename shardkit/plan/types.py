"""The parts of a plan, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError, message


def is_world_size(reshard_after_forward: bool | int) -> bool:
    """Return whether ``reshard_after_forward`` is a number of ranks.

    The one place that tells them apart: ``isinstance(True, int)`` and ``True == 1`` hold in Python.
    """
    return isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)


def ancestors(fqn: str) -> list[str]:
    """Return the FQNs of the modules around ``fqn``, innermost first, the root ``""`` last; none for the root."""
    parts = fqn.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, -1, -1)] if fqn else []


@dataclass
class Collectives:
    """The number of collectives that one forward and backward runs on each rank.

    ``plan.collectives()`` predicts one of these, ``shardkit.testing.comm_counts()`` counts one.
    """

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0


class ParamSpec(NamedTuple):
    """What a plan records about one parameter.

    Attributes:
        fqn: its name in ``model.named_parameters()``.
        shape: its unsharded shape, in elements.
        dtype: the dtype it is stored and optimized in.
        trainable: its ``requires_grad``.
        aliases: the further FQNs under which a tied parameter is registered.
        tensor_parallel: whether it was a DTensor before sharding, on another axis of the mesh.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    tensor_parallel: bool = False

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return torch.Size(self.shape).numel()

    @property
    def shards(self) -> bool:
        """Whether FSDP2 can shard it: it has a dim and an element."""
        return bool(self.shape) and 0 not in self.shape

    def shard_numel(self, ranks: int, dim: int = 0) -> int:
        """Elements of the largest of its shards on ``dim``, that of rank 0: torch splits like torch.chunk."""
        size = self.shape[dim] if self.shape else 1
        return -(-size // ranks) * (self.numel // size) if size else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameter, in its stored dtype."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class MeshSpec:
    """Shape and axis names of a device mesh, in ranks; needs no process group.

    One axis shards (FSDP). Two axes replicate over the first and shard over the second (HSDP), torch's own
    order; ``(n, 1)`` replicates only, like DDP.

    Example:
        >>> MeshSpec.hybrid(2, 4).size
        8
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    def __post_init__(self) -> None:
        sizes_fit = all(isinstance(size, int) and size >= 1 for size in self.shape)
        if len(self.shape) not in (1, 2) or len(self.axis_names) != len(self.shape) or not sizes_fit:
            problem = f"shape {self.shape} with axis names {self.axis_names}"
            rule = "A mesh has one or two axes of at least one rank, each with a name"
            fix = "Use MeshSpec.sharded(ranks) or MeshSpec.hybrid(replicate, shard)"
            raise PlanError(message("mesh", problem, rule, fix))

    @classmethod
    def sharded(cls, ranks: int) -> MeshSpec:
        """Shard over all ``ranks``: FSDP."""
        return cls((ranks,), ("dp_shard",))

    @classmethod
    def hybrid(cls, replicate: int, shard: int) -> MeshSpec:
        """Replicate ``replicate`` times, and shard each replica over ``shard`` ranks: HSDP."""
        return cls((replicate, shard), ("dp_replicate", "dp_shard"))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return torch.Size(self.shape).numel()

    @property
    def shard_size(self) -> int:
        """The number of ranks over which each parameter is sharded."""
        return self.shape[-1]

    @property
    def replicates(self) -> bool:
        """Whether there is a replicate axis, so that gradients are all-reduced over it."""
        return len(self.shape) == 2

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))


@dataclass(frozen=True)
class ShardUnit:
    """One future ``fully_shard`` call: the modules that share one all-gather.

    Attributes:
        modules: FQNs, ``""`` is the root; more than one is torch's list form, ``fully_shard([a, b])``.
        params: FQNs of the parameters this call will own, in torch's order; a tied one once.
        reshard_after_forward: resolved, never None; an int is the number of ranks to reshard to.
        mp_policy: torch's own class; in a plan, ``reduce_dtype=None`` beside a ``param_dtype`` becomes the dtype of
            the unit's trainable parameters.
        offload_policy: torch's own class.
        checkpoint_activations: recompute the forward of each of the modules in backward.
        compile: compile the forward of each of the modules, after checkpointing and before sharding.
        shard_dims: the parameters that are not sharded on dim 0, as pairs ``(fqn, dim)`` in the order of ``params``; a
            mapping is converted. The shard axis must divide their sizes.
    """

    modules: tuple[str, ...]
    params: tuple[str, ...]
    reshard_after_forward: bool | int = True
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    checkpoint_activations: bool = False
    compile: bool = False
    shard_dims: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        dims = dict(self.shard_dims)
        order = [*(fqn for fqn in self.params if fqn in dims), *sorted(dims.keys() - set(self.params))] if dims else []
        # `or type(...)`: True and False are not dims, and the check of the plan names them.
        pairs = tuple((fqn, dims[fqn]) for fqn in order if dims[fqn] or type(dims[fqn]) is not int)
        object.__setattr__(self, "shard_dims", pairs)

    def __hash__(self) -> int:
        return hash((self.modules, self.params))  # torch's OffloadPolicy is not hashable

    @property
    def name(self) -> str:
        """The unit as tables and errors call it."""
        names = [fqn or "(root)" for fqn in self.modules]
        return names[0] if len(names) == 1 else f"[{', '.join(names)}]"

    def dim_of(self, fqn: str) -> int:
        """The dim on which one of its parameters is sharded."""
        return dict(self.shard_dims).get(fqn, 0)

    @property
    def offloads(self) -> bool:
        """Whether its shards, gradients and optimizer state live on the CPU."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)
