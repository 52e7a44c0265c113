"""Random number generators during recording: nothing is drawn, and every reseeding is detected.

While a tape records, a generator holds a *marker*, a state that says only "after n random ops". Whoever saves
and restores states inside the construction (``torch.random.fork_rng``) saves and restores markers, which replay
turns into true states; whoever seeds (``torch.manual_seed``) leaves a state that is not a marker, which is taken
literally. After the recording the generator holds a last marker, which stands for the state that ordinary
construction would have left. It must differ from every state before: were the generator put back to where it
was, a second recording could not tell "goes on from the first" from "seeded with the same number again".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shardkit import _torch
from shardkit.meta.tape import Stream, Tape, hash_bytes

# Seeds of markers: a range in which no user's seed falls by accident.
_MARK = 0x5EED_0F_5A4D_0000


class Watch:
    """The generator of one stream while a tape records."""

    def __init__(self, tape: Tape, generator: torch.Generator | None) -> None:
        self.generator = generator if generator is not None else torch.default_generator
        self._tape = tape
        self._entry = self.generator.get_state()
        pending = _pending.get(id(self.generator))
        chained = pending is not None and torch.equal(pending.marker, self._entry)
        entry = pending.tape if pending is not None and chained else self._entry
        self.stream = Stream(generator, entry, _torch.accelerator_state() if generator is None else None)
        self.num_ops = 0
        self._plant()

    def step(self) -> None:
        """Count one recorded random op."""
        self.num_ops += 1
        self._plant()

    def reset(self) -> Tensor | int | None:
        """Return where the user put the generator since the last marker; None if it was not touched."""
        state = self.generator.get_state()
        if torch.equal(state, self._planted):
            return None
        position = self.generator.initial_seed() - _MARK
        if 0 <= position < self.num_ops and torch.equal(state, self._marker(position)):
            return position
        return state

    def close(self) -> None:
        """Leave the generator with a last marker, and record the state in which replay ends."""
        end = self.reset()
        self.stream.end = self.num_ops if end is None else end
        if isinstance(self.stream.end, Tensor):
            return  # seeded after the last random op: already where ordinary construction leaves it
        self.generator.set_state(self._entry)
        if self.stream.end > 0:
            self.generator.manual_seed(self._last_marker())
            _pending[id(self.generator)] = _Pending(self.generator, self._tape, self.generator.get_state())

    def restore(self) -> None:
        """Leave the generator as it was before recording, after an error."""
        self.generator.set_state(self._entry)

    def _plant(self) -> None:
        self.generator.manual_seed(_MARK + self.num_ops)
        self._planted = self.generator.get_state()

    def _marker(self, position: int) -> Tensor:
        return torch.Generator(self.generator.device).manual_seed(_MARK + position).get_state()

    def _last_marker(self) -> int:
        """Return the seed of the last marker: equal on all ranks and in all runs that began in the same state."""
        digest = hashlib.sha256(str(self.num_ops).encode())
        hash_bytes(digest, self._entry)
        return int.from_bytes(digest.digest()[:7], "big")


@dataclass
class _Pending:
    generator: torch.Generator  # kept alive, so that its id stays its own
    tape: Tape
    marker: Tensor


# For each generator the last recording that it waits to be advanced by. A second recording that finds the marker
# still there goes on where the first one ends.
_pending: dict[int, _Pending] = {}


@contextmanager
def undone_on_error() -> Iterator[None]:
    """Restore torch's default generator, and the recordings that wait for replay, if the body raises."""
    state, pending = torch.get_rng_state(), dict(_pending)
    try:
        yield
    except BaseException:
        torch.set_rng_state(state)
        _pending.clear()
        _pending.update(pending)
        raise


def settle(tapes: Iterable[Tape], ends: dict[Tape, dict[int, Tensor]], device: torch.device, *, seeded: bool) -> None:
    """Set generators to the state that ordinary construction leaves, unless the user moved them since.

    Args:
        tapes: what was replayed, in order.
        ends: state of each generator after each tape, by ``id`` of the generator (of torch's default one as well).
        device: where it was replayed; with an accelerator, its default generator is the one to advance.
        seeded: the user gave the seed at replay: the default generator is set whatever its state.
    """
    for tape in tapes:
        for key, stream in tape.streams.items():
            stream.final = ends[tape][key]
            pending, waiting = _pending.get(key), False
            if pending is not None and pending.tape is tape:
                del _pending[key]
                waiting = torch.equal(pending.generator.get_state(), pending.marker)
            if waiting or (seeded and stream.generator is None):
                generator = _torch.default_generator(device) if stream.generator is None else stream.generator
                generator.set_state(stream.final)
