"""The states of random generators: Python's, torch's on the CPU, and the accelerator's."""

from __future__ import annotations

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


def restore_random(states: Mapping[str, Any]) -> None:
    """Set this process's generators. Local; absent accelerators are skipped."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for kind, state in states.items():
        if state is None:
            continue
        if kind == "python":
            random.setstate(state)
        elif kind == "cpu":
            torch.set_rng_state(state)
        elif accelerator is not None and accelerator.type == kind:
            default_generator(torch.device(kind)).set_state(state)
