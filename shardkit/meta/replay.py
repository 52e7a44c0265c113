"""Replay: run a tape on a real device, in the order of recording, with each tensor in memory while it is in use.

Ops that no wanted value depends on are left out. A random op whose result is not used still draws its numbers, if a
later one begins in the state that it leaves.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardkit._torch import dispatch
from shardkit.meta.tape import Op, Recording, State, Stream, Tape, View, hash_bytes, map_leaves, tensors_of, view_of

Device: TypeAlias = torch.device | str | None


class Final(NamedTuple):
    """A value to compute: ``take(value, alone)`` gets it once; if ``alone``, its memory may be kept."""

    view: View
    take: Callable[[Tensor, bool], object]


class Step(NamedTuple):
    """One op of a replay."""

    at: int  # the index of the op on the tape
    op: Op
    computes: bool  # False: only its random numbers are needed
    before: State | int | None  # the state of its generator: as someone set it, or as the op of that index leaves it
    saves: bool  # a step that is not the next one begins with the state that it leaves
    finals: list[Final]  # taken after it
    frees: set[int]  # storages that no later step uses


def plan(
    ops: list[Op], finals: list[Final], states: Mapping[Stream, list[State | int]], ends: Mapping[Stream, State | int]
) -> list[Step]:
    """Return the steps that lead to the finals and to the generators' states ``ends``.

    An op is needed if it changes memory that a later step reads, or leaves a state that a later step begins with.
    """
    last_change = {storage: index for index, op in enumerate(ops) for storage in op.changed()}
    due: dict[int, list[Final]] = defaultdict(list)
    for final in finals:
        due[last_change[final.view.storage]].append(final)
    steps: list[Step] = []
    read: set[int] = set()  # by later steps
    following = dict(ends)  # what the next step of each stream begins with
    begun = {end for end in ends.values() if isinstance(end, int)}  # the ops whose states later steps begin with
    saved: set[int] = set()
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        # How many numbers it draws may follow from the values that it reads.
        computes = index in due or (index in begun and op.uses_values()) or not read.isdisjoint(op.changed())
        if not (computes or index in begun):
            continue
        before = None
        if op.stream is not None:
            before, then = states[op.stream][op.at], following.get(op.stream)
            following[op.stream] = before
            begun.update([before] if isinstance(before, int) else [])
            saved.update([then] if isinstance(then, int) and then != index else [])
        used = {*op.changed(), *(view.storage for view in op.reads)} if computes else set()
        steps.append(Step(index, op, computes, before, index in saved, due.get(index, []), used - read))
        read.update(used)
        read.difference_update(op.made() if computes else ())
    return steps[::-1]


class Player:
    """Runs a tape on a device and hands out final values.

    Args:
        device: where everything is computed; None is where the first of them was recorded.
        seed: begin the first recording of a wanted value with it, and let later ones go on from there; None: with the
            states that they found.
        draw_all: draw all random numbers, so that generators can be left as after construction; else only as many as
            the values need, such as none for a table of frequencies.
    """

    def __init__(
        self, tape: Tape, finals: list[Final], *, device: Device = None, seed: int | None = None, draw_all: bool = True
    ) -> None:
        recordings = self._recordings(tape, finals)
        self._tape, self._seed = tape, seed
        self.device = torch.device(device or (recordings[0].device if recordings else "cpu"))
        states = {stream: list(stream.states) for stream in tape.streams.values()}
        if seed is not None and recordings:
            default = tape.streams[id(torch.default_generator)]
            states[default][recordings[0].entry] = State(torch.Generator().manual_seed(seed).get_state())
            for one, following in pairwise(recordings):
                if isinstance(states[default][following.entry], State):  # seeded between the two
                    states[default][following.entry] = states[default][one.ends[default]]
        self._marks = recordings[-1].ends if draw_all and recordings else {}
        self._ends = {stream: states[stream][end] for stream, end in self._marks.items()}
        self._steps, self._states = plan(tape.ops, finals, states, self._ends), states
        on_device = dispatch.default_generator(self.device)
        self._generators = {s: on_device if s.is_default else torch.Generator(s.generator.device) for s in states}
        self._drew: dict[Stream, int] = {}  # the last op that drew
        self._saved: dict[int, Tensor] = {}  # states after ops, by index
        self._left: dict[Stream, Tensor] = {}  # states at the end
        self._real: dict[int, torch.UntypedStorage] = {}

    @staticmethod
    def _recordings(tape: Tape, finals: list[Final]) -> list[Recording]:
        """Return the recordings from the first to the last one that changed memory of a wanted value."""
        storages = {final.view.storage for final in finals}
        changes = [index for index, op in enumerate(tape.ops) if not storages.isdisjoint(op.changed())]
        starts = [recording.start for recording in tape.recordings]
        ends = [bisect(starts, index) for index in (*changes[:1], *changes[-1:])] or [1, 0]
        return tape.recordings[ends[0] - 1 : ends[1]]

    def keep(self, finals: list[Final]) -> None:
        """Compute these alone, each draw from a state of its own: other values, the same with whichever finals."""
        self._marks, self._ends = {}, {}
        for found in self._states.values():
            digest = hashlib.sha256()
            for at, state in enumerate(found):
                if isinstance(state, State):
                    digest = hashlib.sha256()
                    hash_bytes(digest, state.value)
                else:
                    digest.update(b"next")
                    generator = torch.Generator().manual_seed(int.from_bytes(digest.digest()[:7], "little"))
                    found[at] = State(generator.get_state())
        self._steps = plan(self._tape.ops, finals, self._states, {})

    def drawn(self) -> int:
        """Return how many random numbers will be drawn, if ops draw one for each element."""
        drawn = (step.op for step in self._steps if step.op.stream is not None)
        views = (view for op in drawn for view in [*op.outs, *(view for view, _ in op.writes)] if view is not None)
        return sum(math.prod(view.size) for view in views)

    def compute(self) -> None:
        """Replay. Local; torch's default generator and dtype are as before afterwards."""
        generator, dtype = dispatch.default_generator(self.device), torch.get_default_dtype()
        state = generator.get_state()
        try:
            with torch.no_grad():
                for step in self._steps:
                    self._run(step)
            for stream, end in self._ends.items():
                self._go_to(stream, end)
                self._left[stream] = self._generators[stream].get_state()
        finally:
            generator.set_state(state)
            torch.set_default_dtype(dtype)

    def settle_generators(self) -> None:
        """Put generators where ordinary construction leaves them, unless someone seeded them or drew since.

        Where the user gave a seed, the default one is put there in any case.
        """
        for stream, state in self._left.items():
            if stream.marked() == self._marks[stream] or (self._seed is not None and stream.is_default):
                generator = dispatch.default_generator(self.device) if stream.is_default else stream.generator
                generator.set_state(state)

    def digests(self) -> dict[str, str]:
        """Return hashes of what decides the values: the construction, and the random states that it began with."""
        construction, random = hashlib.sha256(), hashlib.sha256()
        numbers: dict[int, int] = {}  # of storages and ops, which other recordings on the tape would shift
        orders = {step.at: order for order, step in enumerate(self._steps)}

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, View):
                number = numbers.setdefault(leaf.storage, len(numbers))
                return (number, leaf.size, leaf.stride, leaf.offset, leaf.dtype, leaf.conj, leaf.neg)
            return "generator" if isinstance(leaf, torch.Generator) else leaf

        for step in self._steps:
            op, before = step.op, orders.get(step.before) if isinstance(step.before, int) else None
            name = getattr(op.func, "__name__", None)
            call = (name, *map_leaves(plain, (op.args, op.kwargs, op.outs)), op.default_dtype, step.computes, before)
            construction.update(repr(call).encode())
            if op.value is not None:
                hash_bytes(construction, op.value)
            if isinstance(step.before, State):
                hash_bytes(random, step.before.value)
        return {"the construction": construction.hexdigest()[:16], "the random state": random.hexdigest()[:16]}

    def _go_to(self, stream: Stream, state: State | int) -> None:
        if isinstance(state, State):
            state.restore(self._generators[stream])
        elif state != self._drew.get(stream):
            self._generators[stream].set_state(self._saved[state])

    def _run(self, step: Step) -> None:
        stream = step.op.stream
        if stream is not None and step.before is not None:
            self._go_to(stream, step.before)
            self._drew[stream] = step.at
        self._compute(step.op) if step.computes else self._call(step.op)
        if stream is not None and step.saves:
            self._saved[step.at] = self._generators[stream].get_state()
        self._take(step)

    def _take(self, step: Step) -> None:
        """Pass on the values that are final after a step, and free what no later step uses."""
        for position, final in enumerate(step.finals, 1):
            number = final.view.storage
            alone = number in step.frees and all(other.view.storage != number for other in step.finals[position:])
            final.take(final.view.of(self._real[number]), alone)
        for number in step.frees:
            del self._real[number]

    def _compute(self, op: Op) -> None:
        for number in op.overwritten():
            self._real[number] = self._allocate(number)
        if op.func is None or op.undefined:
            (number,) = op.made()
            copy = None if op.value is None else op.value.to(self.device, copy=True)
            self._real[number] = self._allocate(number) if copy is None else copy.untyped_storage()
            return
        results = tensors_of(self._call(op))
        for out, result in zip(op.outs, results, strict=any(op.outs)):
            if out is not None:
                self._real[out.storage] = self._as_recorded(out, result)

    def _call(self, op: Op) -> Any:
        """Run the recorded call. Storages that are not in memory are not read by it."""
        scratch: dict[int, torch.UntypedStorage] = {}

        def leaf(value: Any) -> Any:
            if isinstance(value, View):
                memory = self._real if value.storage in self._real else scratch
                if value.storage not in memory:
                    memory[value.storage] = self._allocate(value.storage)
                storage = memory[value.storage]
                if storage.nbytes() < value.num_bytes():  # resize_ was called on it
                    storage.resize_(self._tape.storages[value.storage].nbytes())
                return value.of(storage)
            return self._generators[self._tape.streams[id(value)]] if isinstance(value, torch.Generator) else value

        assert op.func is not None
        if torch.get_default_dtype() != op.default_dtype:
            torch.set_default_dtype(op.default_dtype)
        args, kwargs = map_leaves(leaf, (op.args, op.kwargs))
        if op.on_device:
            kwargs["device"] = self.device
        return op.func(*args, **kwargs)

    def _allocate(self, number: int) -> torch.UntypedStorage:
        # torch.empty, not UntypedStorage(): so that tools that watch allocations through aten see it.
        num_bytes = self._tape.storages[number].nbytes()
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def _as_recorded(self, out: View, result: Tensor) -> torch.UntypedStorage:
        """Return the storage of a result, with the layout of the meta kernel, which later views rely on."""
        if replace(view_of(result, out.storage), dtype=out.dtype) == out:
            return result.untyped_storage()
        storage = self._allocate(out.storage)
        out.of(storage).copy_(result)
        return storage


def evaluate(tape: Tape, view: View) -> Tensor:
    """Compute a recorded tensor as it is at the end of the tape, on the CPU; draw no more than needed."""
    values: list[Tensor] = []
    final = Final(view, lambda value, alone: values.append(value if alone else value.clone()))
    with dispatch.no_modes():
        Player(tape, [final], device="cpu", draw_all=False).compute()
    return values[0]
