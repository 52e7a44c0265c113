"""The states of random generators: Python's, torch's on the CPU, and the accelerator's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import torch

from shardkit._torch.dispatch import accelerator_state, default_generator


def random_states() -> dict[str, Any]:
    """Return the states of this process's generators by kind; None for an accelerator's before its
    first use. Local.
    """
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        states[accelerator.type] = accelerator_state()
    return states


def restore_random(states: Mapping[str, Any], seed: str | None = None) -> None:
    """Set this process's generators; with a seed, by it and the states. Local; absent accelerators
    are skipped.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for kind, state in states.items():
        if state is None:
            continue
        text = f"{kind} {state if kind == 'python' else state.tolist()} {seed}"
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        if kind == "python":
            random.setstate(state) if seed is None else random.seed(number)
        elif kind == "cpu" or (accelerator is not None and accelerator.type == kind):
            generator = (
                torch.default_generator if kind == "cpu" else default_generator(torch.device(kind))
            )
            generator.set_state(state) if seed is None else generator.manual_seed(number)
