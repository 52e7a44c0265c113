"""Streams and events of the pretended accelerator, which track what has waited for what.

All operators run at once, in program order. Each stream numbers what it runs and records how far into every stream it
has waited, so that an operator that is not ordered after what it depends on raises, although its values are right here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardkit._torch.dispatch import no_torch_function

syncs: list[str] = []  # what made the host wait for the device, in order
_numbers = itertools.count(1)


class Use(NamedTuple):
    """One operator, by its stream and its place in the stream."""

    stream: int
    place: int
    operator: str


class Stream:
    """A stream, and how far into each stream it has waited; for itself, how far it has run."""

    device_index, device_type = 0, 20  # of PrivateUse1, as torch.Stream has them; FSDP2 reads them (torch 2.15)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = next(_numbers)
        self.seen: dict[int, int] = {}

    def wait(self, seen: dict[int, int]) -> None:
        """Order what runs here from now on after everything in ``seen``."""
        for stream, place in seen.items():
            self.seen[stream] = max(place, self.seen.get(stream, 0))

    def wait_stream(self, stream: Stream) -> None:
        self.wait(stream.seen)

    def wait_event(self, event: Event) -> None:
        self.wait(event.seen)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        host_waits("stream", self.seen)

    def __enter__(self) -> Stream:
        _current.append(self)
        return self

    def __exit__(self, *args: object) -> None:
        _current.pop()


class Event:
    """What a stream had run and waited for when the event was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: dict[int, int] = {}
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.seen, self.at = dict((stream or current_stream()).seen), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait(self.seen)

    def query(self) -> bool:
        _arrive(self.seen)
        return True

    def synchronize(self) -> None:
        host_waits("event", self.seen)

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def poison(host: torch.UntypedStorage) -> None:
    """Fill memory with a pattern that is NaN in floating point, so that a use before a write shows."""
    if host.nbytes():
        with no_torch_function():
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(host).fill_(0xFF)


_host = Stream()
_current = [Stream()]  # for all threads: autograd's threads use the caller's streams
_ran: dict[int, int] = {}  # by stream: how far it has run
_last: dict[int, tuple[Use | None, dict[int, Use]]] = {}  # by address: the last writer, and the readers since
_under_way: list[tuple[Use, Tensor, Tensor]] = []  # copies to pinned memory: target and value


def reset() -> None:
    """Clear what was counted, used and in flight."""
    for each in (syncs, _last, _under_way):
        each.clear()


def current_stream(*args: Any) -> Stream:
    return _current[-1]


def use(operator: str, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> Use:
    """Record an operator of the current stream on memory at these addresses.

    Raises:
        RuntimeError: another stream uses that memory, and this one has not waited for it.
    """
    stream, written = current_stream(), set(writes)
    stream.wait(_host.seen)
    now = Use(stream.stream_id, _ran.get(stream.stream_id, 0) + 1, operator)
    stream.seen[now.stream] = _ran[now.stream] = now.place
    for at in {*reads, *written}:
        writer, readers = _last.get(at, (None, {}))
        for earlier in (writer, *(readers.values() if at in written else ())):
            if earlier is not None and not _has_seen(stream.seen, earlier):
                raise RuntimeError(
                    f"pretend: {operator} on stream {now.stream} uses memory that {earlier.operator} on stream "
                    f"{earlier.stream} uses, and has not waited for it. Call wait_stream or wait_event first"
                )
        _last[at] = (now, {}) if at in written else (writer, {**readers, now.stream: now})
    return now


def _has_seen(seen: dict[int, int], earlier: Use) -> bool:
    return earlier.place <= seen.get(earlier.stream, 0)


def allocated(at: int) -> None:
    """Record that memory at this address was allocated on the current stream."""
    stream = current_stream().stream_id
    _last[at] = Use(stream, _ran.get(stream, 0), "its allocation"), {}


def copy_to_pinned(now: Use, target: Tensor, value: Tensor) -> None:
    """Copy when the host waits for it; until then the target reads as NaN."""
    _under_way.append((now, target, value.clone()))
    nothing = torch.empty_like(value)
    poison(nothing.untyped_storage())
    target.copy_(nothing)


def host_waits(what: str, seen: dict[int, int] | None = None) -> None:
    """Record that the host waits for everything in ``seen``; None is everything on the current stream."""
    syncs.append(what)
    _arrive(current_stream().seen if seen is None else seen)


def synchronize(*args: Any) -> None:
    """Make the host wait for all streams."""
    host_waits("device", _ran)


def deliver(at: int) -> None:
    """Finish copies to pinned memory at this address, which a stream reads."""
    _finish(lambda _, target: target.untyped_storage().data_ptr() == at)


def _arrive(seen: dict[int, int]) -> None:
    _host.wait(seen)
    _finish(lambda use, _: _has_seen(seen, use))


def _finish(done: Callable[[Use, Tensor], bool]) -> None:
    for copy in [copy for copy in _under_way if done(copy[0], copy[1])]:
        _under_way.remove(copy)
        copy[1].copy_(copy[2])
