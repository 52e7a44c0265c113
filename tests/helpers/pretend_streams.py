"""Streams and events of the pretended accelerator: all operators run at once, and the host's waits
are counted.

A copy to pinned memory reads as NaN until the host has waited for the device.
"""

import torch

from shardkit._torch.dispatch import no_torch_function

syncs = []  # what made the host wait for the device, in order
_under_way = []  # copies to pinned memory: target and value


class Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        arrive()
        return True

    def synchronize(self):
        host_waits("event")


class Stream:
    # of PrivateUse1, as torch.Stream has them; FSDP2 reads them (torch 2.15)
    device_index, device_type = 0, 20
    stream_id = 1

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        host_waits("stream")

    def is_capturing(self):
        return False  # a graph; optimizers ask it (torch 2.15)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass


_stream = Stream()


def current_stream(*args):
    return _stream


def poison(host):
    """Fill memory with a pattern that is NaN in floating point, so that a use before
    a write shows.
    """
    if host.nbytes():
        with no_torch_function():
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(host).fill_(0xFF)


def copy_to_pinned(target, value):
    """Copy when the host waits; until then the target reads as NaN."""
    _under_way.append((target, value.clone()))
    nothing = torch.empty_like(value)
    poison(nothing.untyped_storage())
    target.copy_(nothing)


def host_waits(what):
    syncs.append(what)
    arrive()


def synchronize(*args):
    host_waits("device")


def arrive():
    """Finish copies to pinned memory."""
    while _under_way:
        target, value = _under_way.pop(0)
        target.copy_(value)
