"""``torch.distributed.fsdp.wrap``: torch's own policies, ``wrap`` and ``enable_wrap``, which take any wrapper class."""

import typing as _typing

from torch.distributed.fsdp.wrap import *  # noqa: F403  every public name, as a program's star import finds them

from shardkit.fsdp1.dropin.private import resolve as _resolve


def __getattr__(name: str) -> _typing.Any:
    return _resolve("wrap", name)
