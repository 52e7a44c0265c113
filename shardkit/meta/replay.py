"""Replay: run a tape on a real device, in the order of recording, each tensor in memory while it is
used.

Calls that no wanted value depends on are left out. One that draws random numbers runs also where
its result is not used, if a later one begins in the state that it leaves.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardkit._torch import dispatch
from shardkit._torch.dispatch import tensors_of, tree_map
from shardkit.meta.tape import Op, Tape, View, view_of


class Final(NamedTuple):
    """A value to compute: ``take`` gets it once, and copies what it keeps unless it keeps all of
    it.
    """

    view: View
    take: Callable[[Tensor], object]


class Step(NamedTuple):
    """One op of a replay."""

    number: int  # of the op on the tape
    op: Op
    finished: set[int]  # wanted storages that nobody changes after it
    frees: set[int]  # storages that no later step uses


def steps_for(
    ops: list[Op], wanted: Collection[int], states: Collection[Tensor | int]
) -> list[Step]:
    """Return the steps that lead to the final content of the wanted storages, and to generator
    states.
    """
    drawn = {state for state in states if isinstance(state, int)}  # ops whose states are needed
    live: set[int] = set()  # storages that later steps need
    unfinished = set(wanted)  # storages whose last change was not met yet
    steps = []
    for number in reversed(range(len(ops))):
        op = ops[number]
        changes = op.changes()
        finished = changes & unfinished
        unfinished -= finished
        if not (finished or number in drawn or not live.isdisjoint(changes)):
            continue
        if isinstance(op.before, int):
            drawn.add(op.before)
        used = changes | op.reads
        steps.append(Step(number, op, finished, used - live))
        live |= used
        live -= op.makes
    return steps[::-1]


class Player:
    """Computes values of a tape on a device, and with ``settle`` also where generators end.
    Local.
    """

    def __init__(
        self,
        tape: Tape,
        finals: list[Final],
        device: torch.device | str | None = None,
        settle: bool = False,
    ) -> None:
        self._tape = tape
        self.device = torch.device(device or tape.device)
        self._finals: dict[int, list[Final]] = {}  # by storage
        for final in finals:
            self._finals.setdefault(final.view.storage, []).append(final)
        self._ends: dict[torch.Generator, Tensor | int] = {}
        for stream in tape.streams.values() if settle else ():
            position = stream.position()
            if position is not None:  # else someone seeded it or drew since
                self._ends[stream.generator] = stream.states[position]
        self.steps = steps_for(tape.ops, self._finals, self._ends.values())
        # A state is saved if the next step that draws from the generator does not begin with it.
        last: dict[torch.Generator | None, int] = {}
        begins = [(step.op.generator, step.op.before, step.number) for step in self.steps]
        begins += [(generator, state, -1) for generator, state in self._ends.items()]
        self._to_save: set[int] = set()
        for generator, state, number in begins:
            if isinstance(state, int) and last.get(generator) != state:
                self._to_save.add(state)
            last[generator] = number
        self._saved: dict[int, Tensor] = {}  # states, by the number of the op that left them
        self._last: dict[torch.Generator, int] = {}  # the op that drew from it last
        self._memory: dict[int, torch.UntypedStorage] = {}  # real storages, while they are used
        # The generators that replay draws from, by those of the construction.
        self._generators: dict[torch.Generator, torch.Generator] = {}
        for generator in tape.streams:
            if generator is torch.default_generator:
                self._generators[generator] = dispatch.default_generator(self.device)
            else:
                self._generators[generator] = torch.Generator(generator.device)

    def compute(self) -> None:
        """Run all steps; afterwards torch's default dtype and generator are as before, or where
        they end.
        """
        default = dispatch.default_generator(self.device)
        before = default.get_state()
        dtype = torch.get_default_dtype()
        ends = {}
        try:
            with torch.no_grad():
                for step in self.steps:
                    self._run(step)
            for generator, state in self._ends.items():
                self._restore(generator, state)
                ends[generator] = self._generators[generator].get_state()
        finally:
            torch.set_default_dtype(dtype)
            default.set_state(before)
        for generator, end in ends.items():
            own = default if generator is torch.default_generator else generator
            own.set_state(end)

    def digests(self) -> dict[str, str]:
        """Return hashes of what decides the values: the construction, and the states that it began
        with.
        """
        construction, random = hashlib.sha256(), hashlib.sha256()
        # Numbers from 0 for storages and for ops, since those of other models are on the tape too.
        storages: dict[int, int] = {}
        ops: dict[int, int] = {}

        def renumbered(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return replace(leaf, storage=storages.setdefault(leaf.storage, len(storages)))
            return "generator" if isinstance(leaf, torch.Generator) else leaf

        for step in steps_for(
            self._tape.ops, self._finals, ()
        ):  # without what only settles generators
            op = step.op
            ops[step.number] = len(ops)
            before = ops[op.before] if isinstance(op.before, int) else None
            name = getattr(op.func, "__name__", None)
            arguments = tree_map(renumbered, (op.args, op.kwargs, op.outs))
            call = (name, before, op.default_dtype, *arguments)
            construction.update(repr(call).encode())
            if op.value is not None:
                _hash_bytes(construction, op.value)
            if isinstance(op.before, Tensor):
                _hash_bytes(random, op.before)
        return {
            "the construction": construction.hexdigest()[:16],
            "the random state": random.hexdigest()[:16],
        }

    def _restore(self, generator: torch.Generator, state: Tensor | int) -> None:
        own = self._generators[generator]
        if isinstance(state, int):
            if state == self._last.get(generator):
                return
            state = self._saved[state]
        if own.device.type == "cpu" or state.numel() == own.get_state().numel():
            own.set_state(state)
        else:  # a state of the CPU's generator, for another device: the seed that it was made with
            own.manual_seed(torch.Generator().set_state(state).initial_seed())

    def _run(self, step: Step) -> None:
        op = step.op
        if op.generator is not None and op.before is not None:
            self._restore(op.generator, op.before)
        self._call(op)
        if op.generator is not None:
            self._last[op.generator] = step.number
            if step.number in self._to_save:
                self._saved[step.number] = self._generators[op.generator].get_state()
        for storage in step.finished:
            for view, take in self._finals[storage]:
                take(view.of(self._memory[storage]))
        for storage in step.frees:
            del self._memory[storage]

    def _call(self, op: Op) -> None:
        if op.func is None:
            for storage in op.makes:
                self._memory[storage] = self._allocate(storage)
            if op.value is not None:
                (view,) = op.outs
                assert view is not None
                view.of(self._memory[view.storage]).copy_(op.value)
            return
        returned = {out.storage for out in op.outs if out is not None}
        for storage in op.makes - returned:
            self._memory[storage] = self._allocate(storage)
        if torch.get_default_dtype() != op.default_dtype:
            torch.set_default_dtype(op.default_dtype)
        args, kwargs = tree_map(self._real, (op.args, op.kwargs))
        if op.on_device:
            kwargs["device"] = self.device
        results = tensors_of(op.func(*args, **kwargs))
        for out, result in zip(op.outs, results, strict=any(op.outs)):
            if out is not None:
                self._memory[out.storage] = self._as_recorded(out, result)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return self._generators[leaf]
        if not isinstance(leaf, View):
            return leaf
        if leaf.storage in self._memory:
            return leaf.of(self._memory[leaf.storage])
        # not read: zeros_like() looks at sizes only
        return leaf.of(self._tape.storages[leaf.storage])

    def _allocate(self, storage: int) -> torch.UntypedStorage:
        # Not UntypedStorage(), so that tools that watch allocations through aten see it.
        size = self._tape.storages[storage].nbytes()
        return torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()

    def _as_recorded(self, out: View, result: Tensor) -> torch.UntypedStorage:
        """Return the storage of a result, in the layout of the meta kernel, which later views rely
        on.
        """
        storage = result.untyped_storage()
        if tuple(result.shape) != out.size:  # as what batch_norm does not save in eval mode
            return storage
        size = self._tape.storages[out.storage].nbytes()  # larger where a resize_ follows
        if storage.nbytes() < size or view_of(result, out.storage) != out:
            storage = self._allocate(out.storage)
            out.of(storage).copy_(result)
        return storage


def evaluate(tape: Tape, view: View) -> Tensor:
    """Compute a recorded tensor as it is at the end of the tape, on the CPU."""
    values: list[Tensor] = []
    with dispatch.no_modes():
        Player(tape, [Final(view, lambda value: values.append(value.clone()))], "cpu").compute()
    return values[0]


def _hash_bytes(digest: Any, tensor: Tensor) -> None:
    """Add the bytes of a tensor to a hash; without numpy, and without a copy of CPU memory."""
    tensor = tensor.cpu()
    if tensor.numel():
        digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
