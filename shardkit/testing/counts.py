"""Test in one process: a fake world, and counts of collectives; and an assertion across ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit._torch.dispatch import TorchDispatchMode, fake_store, forget_meshes
from shardkit.errors import ShardkitError, listing
from shardkit.plan import Collectives

# Each call of an operator in these namespaces is one collective: torch.distributed and FSDP2
# dispatch c10d, DTensor dispatches _c10d_functional.
NAMESPACES = ("c10d", "_c10d_functional")
# By how the operators' names begin without underscores, of which there are many spellings:
# allgather_, _allgather_base_, all_gather_into_tensor_coalesced.
KINDS = {
    "allgather": "all_gathers",
    "reducescatter": "reduce_scatters",
    "allreduce": "all_reduces",
    "alltoall": "all_to_alls",
}
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Act as one rank of ``world_size`` in this process alone. Local: no other process exists.

    All of FSDP2 runs, but values are wrong: collectives return at once and leave their outputs as
    they were. Use it for structure (units, placements, shapes, state-dict keys) and for
    ``comm_counts``, never for values.

    Args:
        world_size: number of ranks.
        rank: of this process.

    Raises:
        ValueError, RuntimeError: a process group exists already, or ``rank`` is not in the world
            (torch's).

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> with fake_world(8):
        ...     model = fully_shard(torch.nn.Linear(16, 4))
        >>> model.weight.placements, model.weight.to_local().shape
        ((Shard(dim=0),), torch.Size([1, 16]))
    """
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        if dist.is_initialized():  # the body may have destroyed it
            dist.destroy_process_group()
        forget_meshes()


@dataclass
class CommCounts(Collectives):
    """Counts of collectives; equal to any ``Collectives`` with the same numbers.

    Attributes:
        other: every other collective by its operator's name, such as ``{"broadcast_": 1}``. Not
            compared, because ``plan.collectives()`` predicts training steps only.
    """

    other: dict[str, int] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Compare the numbers, also with a plain ``Collectives``."""
        if not isinstance(other, Collectives):
            return False
        names = [field.name for field in fields(Collectives)]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def add(self, operator: str) -> None:
        """Count one call of a collective operator, by its name without namespace and overload."""
        for prefix, kind in KINDS.items():
            if operator.replace("_", "").startswith(prefix):
                setattr(self, kind, getattr(self, kind) + 1)
                return
        if operator not in NO_COLLECTIVES:
            self.other[operator] = self.other.get(operator, 0) + 1


@contextmanager
def comm_counts() -> Iterator[CommCounts]:
    """Count the collectives that this process issues inside the block, in forward and backward.
    Local.

    Yields a ``CommCounts`` that is updated as the block runs. ``all_gather_object`` and the like
    count as the collectives that they consist of.

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> with fake_world(8):
        ...     model = fully_shard(torch.nn.Linear(16, 8))
        ...     with comm_counts() as counts:
        ...         model(torch.ones(2, 16)).sum().backward()
        >>> counts.all_gathers, counts.reduce_scatters, counts.all_reduces
        (1, 1, 0)
    """
    counts = CommCounts()
    with _Counter(counts):
        yield counts


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    # torch's CommDebugMode cannot be used: it raises IndexError on the second forward in one block
    # (torch 2.13).
    def __init__(self, counts: CommCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs it, and its own collectives come here one by one
        namespace, _, operator = func.name().partition("::")
        if namespace in NAMESPACES:
            self.counts.add(operator.partition(".")[0])
        return func(*args, **(kwargs or {}))


def assert_same_on_all_ranks(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fail on every rank unless all ranks of the group hold the same value, bit for bit.
    Collective.

    Compares dtype, shape and every byte, so NaN equals the same NaN and 0.0 differs from -0.0. Each
    rank needs memory for one copy of the value from every rank.

    Args:
        value: a plain tensor on any device; of bytes, ``torch.tensor(list(data))``.
        group: the ranks to compare; None is all ranks.

    Raises:
        AssertionError: on every rank, naming the ranks that differ from the group's first.
        ShardkitError: ``value`` is not a plain tensor.

    Examples:
        ``assert_same_on_all_ranks(torch.nn.utils.get_total_norm(gradients).full_tensor())``
    """
    if isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
        raise ShardkitError(
            f"value must be a plain tensor, got {type(value).__name__}. "
            "Pass dtensor.full_tensor(), dtensor.to_local() or torch.tensor(...)."
        )
    kind = f"tensor of {value.dtype} and shape {tuple(value.shape)}"
    as_bytes = value.detach().cpu().flatten().clone().view(torch.uint8)  # float8 has no pickle
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (kind, value.dtype, as_bytes), group)
    first_kind, dtype, expected = gathered[0]
    problems = []
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for rank, (kind, _, actual) in zip(ranks, gathered, strict=True):
        if kind != first_kind:
            problems.append(f"rank {rank} has a {kind}")
        elif not torch.equal(actual, expected):
            wrong = (actual != expected).view(-1, dtype.itemsize).any(1).nonzero().flatten()
            at = int(wrong[0])
            problems.append(
                f"rank {rank} differs in {len(wrong)} of its elements, the first at {at}: "
                f"{actual.view(dtype)[at]} against {expected.view(dtype)[at]}"
            )
    if problems:
        raise AssertionError(
            f"assert_same_on_all_ranks found that {listing(problems)}. All ranks must hold what "
            f"the first holds, a {first_kind}."
        )
