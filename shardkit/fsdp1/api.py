"""``torch.distributed.fsdp.api``: torch's own enums and configurations, so that mixed imports compare equal."""

from typing import Any

from torch.distributed.fsdp.api import *  # noqa: F403
from torch.distributed.fsdp.api import __all__ as __all__

from shardkit.fsdp1.dropin.private import resolve


def __getattr__(name: str) -> Any:
    return resolve("api", name)
