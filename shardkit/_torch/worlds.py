"""Private names of torch for process groups and pretended worlds."""

from __future__ import annotations

from typing import Any

import torch

# testing: otherwise each forked rank imports these in its first forward (``torch._dynamo``: 0.5 to 2 s).
RANK_IMPORTS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")


def fake_store() -> Any:
    """Return a store for the ``fake`` backend, which this import registers (else "Unknown c10d backend type")."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_meshes() -> None:
    """Empty DTensor's caches, keyed by meshes that compare equal though their groups differ (torch 2.13 to 2.15)."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def store_of_its_own(prefix: str) -> Any:
    """Return a client to the store of the default process group that another thread does not keep waiting."""
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    return torch.distributed.distributed_c10d.PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)
