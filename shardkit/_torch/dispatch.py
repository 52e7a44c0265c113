"""Private names of torch for dispatch modes, recorded operators, fake tensors, random numbers,
pretended worlds and state dicts.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, _random

# testing, meta: the documented way to intercept operators, in a module with an underscore.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# meta: a lazy negation is a bit on the tensor, which set_() on a storage does not restore; no
# public setter.
neg_view = torch._neg_view

# meta: TorchFunctionMode stays active inside of __torch_dispatch__; only this private context
# disables it.
no_torch_function = torch._C.DisableTorchFunction


# tiles: a context without dispatch modes, such as that of a selective checkpoint; subclasses keep
# theirs.
no_dispatch_modes = torch.utils._python_dispatch._disable_current_modes


@contextmanager
def no_modes() -> Iterator[None]:
    """Run the body without any dispatch or function modes, including ours."""
    with no_dispatch_modes(), no_torch_function():
        yield


def schema(op: Any) -> Any:
    """Return the schema of an aten op, with the names of its arguments and which it writes to; no
    public access.
    """
    return op._schema


def has_tag(op: Any, name: str) -> bool:
    """Return whether an aten op has the tag of that name, such as ``nondeterministic_seeded``."""
    return getattr(torch.Tag, name) in op.tags


@contextmanager
def recorded_samplers(record: Callable[..., None]) -> Iterator[None]:
    """Inside of the block ``torch.nn.init.trunc_normal_`` on a meta tensor is one call of
    ``record``.

    It draws until every value is in range (torch 2.13), so its aten calls depend on values.
    """
    name = "_no_grad_trunc_normal_"
    original = getattr(torch.nn.init, name)

    def sampler(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.untyped_storage().device.type != "meta":
            return cast(Tensor, original(tensor, *args, **kwargs))
        record(original, tensor, *args, **kwargs)
        return tensor

    setattr(torch.nn.init, name, sampler)
    try:
        yield
    finally:
        setattr(torch.nn.init, name, original)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random ops on the device use by default."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    index = module.current_device()  # this starts CUDA, which has no generators before
    if device.index is not None:
        index = device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def accelerator_state() -> Tensor | None:
    """Return the state of the accelerator's default generator; None without one, or before its
    first use.
    """
    accelerator = torch.accelerator.current_accelerator()
    if (
        accelerator is None
        or not getattr(torch.get_device_module(accelerator), "is_initialized", bool)()
    ):
        return None
    return default_generator(accelerator).get_state()


def in_backward() -> bool:
    """Return whether this thread runs a backward, as where a forward is recomputed. Local."""
    return torch._C._current_graph_task_id() != -1


def adds_gradient_of_its_own(param: Tensor) -> bool:
    """Return whether the backward under way reaches a leaf by autograd. Local; in a backward.

    _fsdp: FSDP2 sets gradients without it. There is no public way to ask (torch 2.11 to 2.15).
    """
    return param.requires_grad and torch._C._will_engine_execute_node(
        torch.autograd.graph.get_gradient_edge(param).node
    )


# memory: FSDP2's hooks map over arguments and outputs with torch's pytree, and what libraries
# registered there.
tree_leaves = torch.utils._pytree.tree_leaves
tree_map = torch.utils._pytree.tree_map


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among arguments or outputs of any structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


_WRAPPERS = (DTensor, AsyncCollectiveTensor)


def has_wrappers(types: Iterable[type]) -> bool:
    """Return whether an operator got tensors of tensor parallelism, or of a collective under way.

    memory: a mode that returns NotImplemented is called again with the tensors that they wrap.
    """
    return any(issubclass(kind, _WRAPPERS) for kind in types)


@contextmanager
def same_dropout_on_shards() -> Iterator[None]:
    """Inside of the block random operators of DTensors leave the device's generator alone.

    memory: on fake tensors they fail, or exchange its state between ranks (torch 2.11 to 2.15).
    """
    module: Any = _random
    before = module._rng_tracker
    module._rng_tracker = SimpleNamespace(
        distribute_region_enabled=False, _distribute_region=lambda *_, **__: nullcontext()
    )
    try:
        yield
    finally:
        module._rng_tracker = before


# memory: tensors with shapes but no data; torch documents them and exports no public name (2.13 to
# 2.15).
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode

# The number of in-place writes to a tensor or its views, with which autograd checks saved tensors.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")

# Whether autograd takes a tensor for a view of another.
is_view: Callable[[Tensor], bool] = operator.methodcaller("_is_view")


# testing: otherwise each forked rank imports these in its first forward (``torch._dynamo``: 0.5 to
# 2 s).
RANK_IMPORTS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")


def fake_store() -> Any:
    """Return a store for the ``fake`` backend, which this import registers (else "Unknown c10d
    backend type").
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_meshes() -> None:
    """Empty DTensor's caches, keyed by meshes that compare equal though their groups differ (torch
    2.13 to 2.15).
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def store_of_its_own(prefix: str) -> Any:
    """Return a client to the store of the default process group that another thread does not keep
    waiting.
    """
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    return torch.distributed.distributed_c10d.PrefixStore(
        prefix, store.clone() if hasattr(store, "clone") else store
    )


def state_dict_metadata(state_dict: Any) -> dict[str, Any]:
    """Return the module versions that ``nn.Module.state_dict`` attaches to its result; empty if
    there are none.
    """
    return getattr(state_dict, "_metadata", None) or {}


def with_state_dict_metadata(state_dict: Any, metadata: dict[str, Any]) -> Any:
    """Attach the result of :func:`state_dict_metadata` where ``nn.Module.load_state_dict`` looks
    for it.
    """
    state_dict._metadata = OrderedDict(metadata)
    return state_dict
