"""A simulated accelerator in Python: real devices and values, with the host's speed and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from shardkit._torch import pretend as machine
from shardkit.testing.counts import fake_world


@dataclass(frozen=True)
class PretendedAccelerator:
    """The result of :func:`pretend_accelerator`.

    Attributes:
        device: the only device, ``pretend:0``.
        syncs: what made the host wait for the device, in order: ``"item"``, ``"copy to the host"``, ``"copy to the
            device"``, ``"stream"``, ``"event"``, ``"device"``, and operators such as ``"aten::nonzero"``. A copy counts
            unless it is ``non_blocking`` and its CPU side is pinned. Clear the list to start counting.
    """

    device: torch.device
    syncs: list[str]

    @property
    def allocated(self) -> int:
        """Bytes of the device's live tensors, without what FSDP2 has freed."""
        return machine.memory.allocated()


@contextmanager
def pretend_accelerator(world_size: int | None = None, rank: int = 0) -> Iterator[PretendedAccelerator]:
    """Give this process an accelerator of type ``"pretend"`` inside the block. Local.

    Its tensors are plain tensors on that device in host memory, and operators compute as on the CPU. An operator on
    tensors of two devices raises, as on a GPU. Uninitialized memory, and memory that FSDP2 freed, reads as NaN. An
    operator raises if it uses memory that another stream uses, without having waited for it; a copy to pinned memory
    reads as NaN until the host waits for it. A collective is complete when it is issued.

    torch registers the name and the operators of such a device for the rest of the process, and some functions of torch
    are replaced inside of the block: use it in tests, in a process without another accelerator.

    Args:
        world_size: act as one rank of that many, as in ``fake_world``, whose collectives leave their outputs as they
            were. None uses the present process group: collectives are real with ``"cpu:gloo,pretend:gloo"`` as the
            backend of ``init_process_group`` or of a ``RankPool``.
        rank: of this process.

    Raises:
        ShardkitError: ``world_size`` is given, and there is a process group already.

    Example:
        >>> with pretend_accelerator(world_size=8) as accelerator:
        ...     model = shard_model(torch.nn.Linear(16, 8))
        ...     accelerator.syncs.clear()
        ...     loss = model(torch.ones(2, 16, device=accelerator.device)).sum()
        ...     accelerator.syncs
        []
    """
    with machine.pretended(), fake_world(world_size, rank) if world_size is not None else nullcontext():
        yield PretendedAccelerator(machine.device(), machine.syncs)
