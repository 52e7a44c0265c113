"""Save and restore the random generators of every rank: Python's, torch's on the CPU, and the accelerator's."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardkit._torch.dispatch import accelerator_state, default_generator

OfRanks = Sequence[bytes]  # the states of one kind of generator, for each rank


def states() -> dict[str, bytes]:
    """Return the states of this process's generators, by kind; the accelerator's if it has been used. Local, pure."""
    found = {"python": json.dumps(random.getstate()).encode(), "cpu": bytes(torch.get_rng_state().tolist())}
    accelerator, state = torch.accelerator.current_accelerator(), accelerator_state()
    return found if accelerator is None or state is None else found | {accelerator.type: bytes(state.tolist())}


def as_tensors(saved: Mapping[str, OfRanks]) -> dict[str, list[Tensor]]:
    """Return states as uint8 tensors."""
    return {kind: [_tensor(each) for each in of_ranks] for kind, of_ranks in saved.items()}


def resume(saved: Mapping[str, OfRanks], rank: int, world_size: int) -> None:
    """Set this rank's generators from those of all ranks that saved. Local.

    If all ranks had the same state, every rank gets it. Else, in a world of the same size each rank gets its own; in
    any other world each is seeded by its rank and rank 0's state: different on each rank, and the same whenever this
    checkpoint is loaded into a world of this size. The state of an absent accelerator is skipped.
    """
    accelerator = torch.accelerator.current_accelerator()
    for kind, of_ranks in saved.items():
        state = of_ranks[rank if len(of_ranks) == world_size else 0]
        digest = hashlib.sha256(state + f"{kind} {rank} of {world_size}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
        is_seeded = len(set(of_ranks)) > 1 and len(of_ranks) != world_size
        if kind == "python" and is_seeded:
            random.seed(seed)
        elif kind == "python":
            version, internal, gauss = json.loads(state)
            random.setstate((version, tuple(internal), gauss))
        elif kind == "cpu" or (accelerator is not None and accelerator.type == kind):
            generator = torch.default_generator if kind == "cpu" else default_generator(torch.device(kind))
            _ = generator.manual_seed(seed) if is_seeded else generator.set_state(_tensor(state))


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
