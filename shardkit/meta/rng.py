"""Random number generators during recording: nothing is drawn, and every reseeding is noticed.

While a tape records, a generator holds a *marker*: a state that says only at which position of its stream it is.

    construction           entry     randn()   normal_()   manual_seed(5)   rand()
    position               0         1         2           3                4
    states[position]       a State   op 0      op 7        a State          op 9
    the generator holds    marker 0  marker 1  marker 2    marker 3         marker 4

Whoever saves and restores states inside the construction (``torch.random.fork_rng``) saves and restores markers, so the
next op begins at an earlier position; whoever seeds leaves a state that is not a marker, which becomes a new position.
Between recordings the generator keeps the last marker, so the next recording goes on from there unless someone seeded
or drew. A marker equals no state before: had the generator its entry state again, "goes on from the first recording"
and "seeded with the same number again" could not be told apart.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardkit._torch import dispatch


class State(NamedTuple):
    """A true state of a generator."""

    value: Tensor
    on_device: Tensor | None = None  # of the accelerator's default generator at that time, if it had one

    def restore(self, generator: torch.Generator) -> None:
        """Give it to a generator; one of another device gets the seed that the state was made with."""
        if generator.device.type != "cpu" and self.on_device is not None:
            generator.set_state(self.on_device)
        elif generator.device.type == "cpu" or self.value.numel() == generator.get_state().numel():
            generator.set_state(self.value)
        else:
            generator.manual_seed(torch.Generator().set_state(self.value).initial_seed())


class Stream:
    """The use of one generator by a tape.

    Attributes:
        states: by position: a state that someone set, or the index of the op that leaves it.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.states: list[State | int] = []
        digest = hashlib.sha256()  # so that ranks and runs that began in the same state have the same markers
        hash_bytes(digest, generator.get_state())
        self._base = int.from_bytes(digest.digest()[:7], "big")  # a range in which no seed falls by accident

    @property
    def is_default(self) -> bool:
        """Whether this is torch's default generator."""
        return self.generator is torch.default_generator

    def marked(self) -> int | None:
        """Return the position whose marker the generator holds; None if it was seeded, or numbers were drawn."""
        position = self.generator.initial_seed() - self._base
        known = 0 <= position < len(self.states)
        return position if known and torch.equal(self.generator.get_state(), self._marker(position)) else None

    def enter(self) -> int:
        """Return the position where the generator is, which may be new, and give it that marker."""
        position = self.marked()
        if position is None:
            on_device = dispatch.accelerator_state() if self.is_default else None
            position = self._add(State(self.generator.get_state(), on_device))
        return position

    def draw(self, op: int) -> int:
        """Note that this op draws; return the position before it."""
        before = self.enter()
        self._add(op)
        return before

    def leave(self) -> int:
        """Return the last position, and give the generator its true state if that needs no replay."""
        position = self.enter()
        state = self.states[position]
        if isinstance(state, State):
            self.generator.set_state(state.value)
        return position

    def _add(self, state: State | int) -> int:
        self.states.append(state)
        self.generator.manual_seed(self._base + len(self.states) - 1)
        return len(self.states) - 1

    def _marker(self, position: int) -> Tensor:
        return torch.Generator(self.generator.device).manual_seed(self._base + position).get_state()


def hash_bytes(digest: Any, tensor: Tensor) -> None:
    """Add a tensor of bytes to a hash; without numpy, and without a copy of CPU memory."""
    tensor = tensor.cpu()
    if tensor.numel():
        digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
