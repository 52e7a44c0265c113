"""Save and restore the random generators of every rank: Python's, torch's on the CPU, and the accelerator's."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardkit._torch import accelerator_state, default_generator

Bytes = Sequence[bytes]  # of one kind of generator, for each rank


def states() -> dict[str, bytes]:
    """Return the states of this process's generators, by kind; the accelerator's if it has been used. Local, pure."""
    found = {"python": json.dumps(random.getstate()).encode(), "cpu": bytes(torch.get_rng_state().tolist())}
    accelerator = torch.accelerator.current_accelerator()
    state = accelerator_state()
    if accelerator is not None and state is not None:
        found[accelerator.type] = bytes(state.tolist())
    return found


def as_tensors(saved: Mapping[str, Bytes]) -> dict[str, list[Tensor]]:
    """Return states as uint8 tensors."""
    return {kind: [_tensor(each) for each in of_ranks] for kind, of_ranks in saved.items()}


def resume(saved: Mapping[str, Bytes], rank: int, world_size: int) -> None:
    """Set this rank's generators from those of all ranks that saved. Local.

    If all ranks had the same state, every rank gets it. Else, in a world of the same size each rank gets its own; in
    any other world each is seeded by its rank and rank 0's state: different on each rank, and the same whenever this
    checkpoint is loaded into a world of this size. The state of an absent accelerator is skipped.
    """
    for kind, of_ranks in saved.items():
        if len(set(of_ranks)) == 1:
            _set(kind, of_ranks[0])
        elif len(of_ranks) == world_size:
            _set(kind, of_ranks[rank])
        else:
            digest = hashlib.sha256(of_ranks[0] + f"{kind} {rank} of {world_size}".encode()).digest()
            _set(kind, int.from_bytes(digest[:8], "little") >> 1)


def _set(kind: str, to: bytes | int) -> None:
    accelerator = torch.accelerator.current_accelerator()
    if kind == "python":
        if isinstance(to, int):
            random.seed(to)
        else:
            version, internal, gauss = json.loads(to)
            random.setstate((version, tuple(internal), gauss))
        return
    if kind == "cpu":
        generator = torch.default_generator
    elif accelerator is not None and accelerator.type == kind:
        generator = default_generator(torch.device(kind))
    else:
        return
    if isinstance(to, int):
        generator.manual_seed(to)
    else:
        generator.set_state(_tensor(to))


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
