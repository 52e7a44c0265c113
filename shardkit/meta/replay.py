"""Replay: run tapes on a real device, with one full tensor alive at a time where the tape allows it.

Random ops run in the order of recording, since each advances the generator; other ops run when a value needs them. A
random op whose result is overwritten later still draws its numbers, into memory that is freed immediately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardkit import _torch
from shardkit.meta.tape import UPDATE, WHOLE, Op, Stream, Tape, View, map_leaves, tensors_of, view_of


@dataclass(frozen=True)
class Final:
    """A value to compute: ``take`` gets it once, as soon as it is final.

    ``take(value, alone)`` may keep the value's memory if it is ``alone``, since nothing else reads it then, and returns
    whether it did.
    """

    view: View
    take: Callable[[Tensor, bool], bool]


@dataclass(slots=True)
class Buffer:
    """One lifetime of a storage: from the op that makes or fully overwrites it to the next one that does."""

    changes: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    uses: int = 0  # needed ops that have not run, and finals that were not taken
    real: torch.UntypedStorage | None = None


class Schedule:
    """Which ops are needed, what each waits for, and after which random op each final value is ready."""

    def __init__(self, ops: list[Op], finals: list[Final]) -> None:
        self.ops = ops
        self.buffers: list[dict[int, Buffer]] = []  # of each op: storage -> the life of it that the op touches
        self.waits: list[list[int]] = []
        current: dict[int, Buffer] = {}
        for index, op in enumerate(ops):
            self.buffers.append(self._touch(index, op, current))
            # For what made what this one reads or changes: the last change before, which waits for those before it.
            changes = [buffer.changes for buffer in self.buffers[index].values()]
            before = (each[:-1] if each[-1] == index else each for each in changes)
            self.waits.append([last for each in before for last in each[-1:]])
        self.final_buffers = [current[final.view.storage] for final in finals]
        self.needed = self._find_needed()
        self._add_order_waits()
        self._count_uses()
        ready = self._ready()
        self.finals_after: dict[int, list[tuple[Final, Buffer]]] = defaultdict(list)
        for final, buffer in zip(finals, self.final_buffers, strict=True):
            self.finals_after[ready[buffer.changes[-1]]].append((final, buffer))

    def _touch(self, index: int, op: Op, current: dict[int, Buffer]) -> dict[int, Buffer]:
        touched = {view.storage: current[view.storage] for view in op.reads}
        for view in op.reads:
            touched[view.storage].reads.append(index)
        for view, kind in op.writes:
            if kind == WHOLE:
                current[view.storage] = Buffer()
            touched[view.storage] = current[view.storage]
            if touched[view.storage].changes[-1:] != [index]:
                touched[view.storage].changes.append(index)
        for out in op.outs:
            if out is not None:
                touched[out.storage] = current[out.storage] = Buffer(changes=[index])
        return touched

    def _find_needed(self) -> list[bool]:
        needed = [False] * len(self.ops)
        todo = [buffer.changes[-1] for buffer in self.final_buffers]
        # What decides how many numbers a random op draws must be right: all that it reads.
        for index, op in enumerate(self.ops):
            if op.random and (op.reads or any(kind == UPDATE for _, kind in op.writes)):
                todo.append(index)
        while todo:
            index = todo.pop()
            if not needed[index]:
                needed[index] = True
                todo += self.waits[index]
        return needed

    def _add_order_waits(self) -> None:
        """Make a change in place wait for the needed reads of the old content."""
        for buffer in _each_once(b for touched in self.buffers for b in touched.values()):
            reads = [index for index in buffer.reads if self.needed[index]]
            for change in buffer.changes:
                if self.needed[change]:
                    self.waits[change] += [read for read in reads if read < change]

    def _count_uses(self) -> None:
        for index, touched in enumerate(self.buffers):
            if self.needed[index]:
                for buffer in _each_once(touched.values()):
                    buffer.uses += 1
        for buffer in self.final_buffers:
            buffer.uses += 1

    def _ready(self) -> list[int]:
        """Return the last random op that each op depends on, itself included; -1 for none."""
        ready: list[int] = []
        for index, op in enumerate(self.ops):
            ready.append(index if op.random else max((ready[i] for i in self.waits[index]), default=-1))
        return ready


def _each_once(buffers: Iterable[Buffer]) -> list[Buffer]:
    return list({id(buffer): buffer for buffer in buffers}.values())


class Player:
    """Runs tapes on a device and hands out final values.

    Args:
        tapes: in the order of recording.
        finals: the values wanted.
        device: where everything is computed.
        seed: begin with ``torch.manual_seed(seed)``; None: with the state that the first tape found.
        draw_all: draw every recorded random number, so that ``ends`` holds the states after construction; else
            stop as soon as all final values are taken.
    """

    def __init__(
        self,
        tapes: list[Tape],
        finals: list[Final],
        *,
        device: torch.device,
        seed: int | None = None,
        draw_all: bool = True,
    ) -> None:
        self._tapes, self.device, self._seed, self._draw_all = tapes, device, seed, draw_all
        self._storages = {number: tape for tape in tapes for number in tape.storages}
        self._schedule = Schedule([op for tape in tapes for op in tape.ops], finals)
        self._done = [False] * len(self._schedule.ops)
        self._generators: dict[int, torch.Generator] = {}
        # Memory that was just freed: models have many tensors of one size, and new memory costs page faults.
        self._spare: torch.UntypedStorage | None = None
        self.ends: dict[Tape, dict[int, Tensor]] = {}

    @property
    def stale(self) -> list[Op]:
        """Constants that are needed but were changed since they were recorded."""
        ops = zip(self._schedule.ops, self._schedule.needed, strict=True)
        return [op for op, needed in ops if needed and op.is_stale()]

    def run(self) -> None:
        """Replay. The default generator is used, and put back to its state at the end."""
        after = self._schedule.finals_after
        last = len(self._schedule.ops) if self._draw_all else max(after, default=-1)
        with _defaults_kept(self.device), torch.no_grad():
            self._take(-1)
            index = 0
            for tape in self._tapes:
                marks = self._begin(tape)
                for op in tape.ops:
                    if index > last:
                        return
                    if op.random:
                        self._draw(index, op, marks[_key(op.generator)])
                        self._take(index)
                    index += 1
                for key, stream in tape.streams.items():
                    marks[key].go_to(stream.end)
                self.ends[tape] = {key: mark.generator.get_state() for key, mark in marks.items()}

    # ---- generators ---------------------------------------------------------------------------------------

    def _begin(self, tape: Tape) -> dict[int, _Marks]:
        """Set each generator of a tape to the state that it had when the tape began."""
        marks = {}
        for key, stream in tape.streams.items():
            generator = self._generator(stream.generator)
            if self._seed is not None and stream.generator is None:
                if tape is self._tapes[0]:
                    generator.manual_seed(self._seed)
            else:
                _set_state(generator, self._entry(stream, key))
            wheres = [op.reset for op in tape.ops if op.random and _key(op.generator) == key]
            positions = {where for where in (*wheres, stream.end) if isinstance(where, int)}
            marks[key] = _Marks(generator, {0: generator.get_state()}, positions)
        return marks

    def _entry(self, stream: Stream, key: int) -> Tensor:
        if isinstance(stream.entry, Tensor):
            on_device = stream.generator is None and self.device.type != "cpu"
            return stream.entry_on_device if on_device and stream.entry_on_device is not None else stream.entry
        if stream.entry in self.ends:
            return self.ends[stream.entry][key]
        final = stream.entry.streams[key].final
        assert final is not None, "a predecessor was replayed neither before nor now"
        return final

    def _generator(self, generator: torch.Generator | None) -> torch.Generator:
        if generator is None:
            return _torch.default_generator(self.device)
        if id(generator) not in self._generators:
            self._generators[id(generator)] = torch.Generator(generator.device)
        return self._generators[id(generator)]

    def _draw(self, index: int, op: Op, marks: _Marks) -> None:
        if op.reset is not None:
            marks.go_to(op.reset)
        if self._schedule.needed[index]:
            for wait in self._schedule.waits[index]:
                self._need(wait)
            self._run(index)
        else:
            real: dict[int, torch.UntypedStorage] = {}
            self._call(op, real)  # for its draws
            self._spare = next(iter(real.values()), None)
        marks.step()

    # ---- values -------------------------------------------------------------------------------------------

    def _take(self, index: int) -> None:
        """Pass on the values that are final after random op ``index``."""
        for final, buffer in self._schedule.finals_after.get(index, ()):
            self._need(buffer.changes[-1])
            assert buffer.real is not None
            alone = buffer.uses == 1
            kept = final.take(final.view.of(buffer.real), alone)
            self._spare = buffer.real if alone and not kept else None
            self._release(buffer)

    def _need(self, index: int) -> None:
        """Run an op that draws nothing, after all that it waits for (a stack, as chains may be long)."""
        stack = [index]
        while stack:
            waiting = [wait for wait in self._schedule.waits[stack[-1]] if not self._done[wait]]
            if waiting:
                stack += waiting
            else:
                index = stack.pop()
                if not self._done[index]:
                    assert not self._schedule.ops[index].random, "a random op out of turn"
                    self._run(index)

    def _run(self, index: int) -> None:
        op, touched = self._schedule.ops[index], self._schedule.buffers[index]
        for view, kind in op.writes:
            if kind == WHOLE:
                touched[view.storage].real = self._allocate(view.storage)
        if op.func is None or op.undefined:
            number = next(view.storage for view in op.outs if view is not None)
            constant = None if op.value is None else op.value.to(self.device, copy=True).untyped_storage()
            touched[number].real = self._allocate(number) if constant is None else constant
        else:
            real = {number: buffer.real for number, buffer in touched.items() if buffer.real is not None}
            results = tensors_of(self._call(op, real))
            for out, result in zip(op.outs, results, strict=any(op.outs)):
                if out is not None:
                    touched[out.storage].real = self._as_recorded(out, result)
        self._done[index] = True
        for buffer in _each_once(touched.values()):
            self._release(buffer)

    def _call(self, op: Op, real: dict[int, torch.UntypedStorage]) -> Any:
        """Run the recorded call. Storages missing in ``real`` are not read by it."""

        def leaf(value: Any) -> Any:
            if isinstance(value, View):
                if value.storage not in real:
                    real[value.storage] = self._allocate(value.storage)
                if real[value.storage].nbytes() < value.num_bytes():  # resize_ was called on it
                    real[value.storage].resize_(self._storages[value.storage].num_bytes(value.storage))
                return value.of(real[value.storage])
            return self._generator(value) if isinstance(value, torch.Generator) else value

        assert op.func is not None
        if torch.get_default_dtype() != op.default_dtype:
            torch.set_default_dtype(op.default_dtype)
        args, kwargs = map_leaves(leaf, (op.args, op.kwargs))
        if op.on_device:
            kwargs["device"] = self.device
        self._spare = None  # not held while the op itself allocates
        return op.func(*args, **kwargs)

    def _allocate(self, number: int) -> torch.UntypedStorage:
        # torch.empty, not UntypedStorage(): so that tools that watch allocations through aten see it.
        num_bytes = self._storages[number].num_bytes(number)
        spare, self._spare = self._spare, None  # given up before another is allocated, so there is never one more
        if spare is not None and spare.nbytes() == num_bytes:
            return spare
        del spare
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def _as_recorded(self, out: View, result: Tensor) -> torch.UntypedStorage:
        """Return the storage of a result, with the layout of the meta kernel, which later views rely on."""
        if replace(view_of(result, out.storage), dtype=out.dtype) == out:
            return result.untyped_storage()
        storage = self._allocate(out.storage)
        out.of(storage).copy_(result)
        return storage

    def _release(self, buffer: Buffer) -> None:
        buffer.uses -= 1
        if buffer.uses == 0:
            buffer.real = None


@dataclass
class _Marks:
    """A generator during the replay of one tape, with the states that the tape goes back to."""

    generator: torch.Generator
    states: dict[int, Tensor]  # by the number of random ops before
    kept: set[int]
    num_ops: int = 0

    def step(self) -> None:
        self.num_ops += 1
        if self.num_ops in self.kept:
            self.states[self.num_ops] = self.generator.get_state()

    def go_to(self, where: Tensor | int) -> None:
        if isinstance(where, Tensor):
            _set_state(self.generator, where)
        elif where != self.num_ops:
            self.generator.set_state(self.states[where])


def _key(generator: torch.Generator | None) -> int:
    return id(generator if generator is not None else torch.default_generator)


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    """Set the state of a CPU generator; on another device, the seed that it was made with."""
    if generator.device.type == "cpu" or state.numel() == generator.get_state().numel():
        generator.set_state(state)
    else:
        generator.manual_seed(torch.Generator().set_state(state).initial_seed())


@contextmanager
def _defaults_kept(device: torch.device) -> Iterator[None]:
    """Restore the state of the device's default generator, and the default dtype, on exit."""
    generator, dtype = _torch.default_generator(device), torch.get_default_dtype()
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
        torch.set_default_dtype(dtype)


def evaluate(tapes: list[Tape], views: Iterable[View]) -> list[Tensor]:
    """Compute recorded tensors as they are at the end of the tapes, on the CPU; draw no more than needed."""
    values: dict[int, Tensor] = {}

    def keep(index: int, value: Tensor, alone: bool) -> bool:
        values[index] = value if alone else value.clone()
        return alone

    finals = [Final(view, partial(keep, index)) for index, view in enumerate(views)]
    with _torch.no_modes():
        Player(tapes, finals, device=torch.device("cpu"), draw_all=False).run()
    return [values[index] for index in sorted(values)]
