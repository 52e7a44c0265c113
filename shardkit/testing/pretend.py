"""An accelerator that is not there: devices and values are real, speed and memory are the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from shardkit._torch import pretend as machine
from shardkit.testing.counts import fake_world


@dataclass(frozen=True)
class PretendedAccelerator:
    """What :func:`pretend_accelerator` yields.

    Attributes:
        device: the only device, ``pretend:0``.
        syncs: what made the host wait for the device, in order: ``"item"``, ``"copy to the host"``, ``"copy to the
            device"``, ``"stream"``, ``"event"``, ``"device"``, and operators such as ``"aten::nonzero"``. A copy is
            one unless it is ``non_blocking`` and its CPU side is pinned. Clear it where counting begins.
    """

    device: torch.device
    syncs: list[str]

    @property
    def allocated(self) -> int:
        """Bytes of the device's tensors that are alive, without what FSDP2 has freed."""
        return machine.memory.allocated()


@contextmanager
def pretend_accelerator(world_size: int | None = None, rank: int = 0) -> Iterator[PretendedAccelerator]:
    """Pretend that this process has an accelerator, of type ``"pretend"``. Local.

    Its tensors are plain tensors on that device with memory of the host, and operators compute what they compute on
    the CPU. An operator on tensors of two devices raises, as on a GPU. Memory that nobody wrote, or that FSDP2 has
    freed, reads as NaN. An operator raises if it uses memory that another stream uses and has not waited for it, and a
    copy to pinned memory reads as NaN until the host has waited. A collective is done when it is issued.

    torch gives the name and the operators of such a device to a process for good, and some functions of torch are
    replaced inside of the block: use it in tests, and in a process that is to have no other accelerator.

    Args:
        world_size: pretend to be one rank of that many too, as ``fake_world`` does, whose collectives leave their
            outputs as they are. None: the process group is yours; with
            ``init_process_group("cpu:gloo,pretend:gloo")`` collectives are real.
        rank: which of them this process is.

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
