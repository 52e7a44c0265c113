"""The bytes that are alive while torch's own FSDP2 runs a step, counted storage by storage."""

import gc
import weakref
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit import apply_plan
from shardkit._fsdp import fsdp_units
from shardkit._torch import is_wrapper, named_sharded_parameters
from shardkit._torch.dispatch import TorchDispatchMode, has_wrappers, tree_leaves
from shardkit.testing import fake_world


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage that an operator has touched, until it is freed; FSDP2's
    resizing shows.
    """

    def __init__(self):
        super().__init__()
        self.sizes = {}
        self.live = 0
        self.peak = 0
        self._references = []

    def see(self, storage):
        key, size = id(storage), storage.nbytes()
        if key not in self.sizes:
            self._references.append(weakref.ref(storage, lambda _: self._change(key, 0, gone=True)))
        self._change(key, size)

    def _change(self, key, size, gone=False):
        self.live += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        if gone:
            del self.sizes[key]
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if has_wrappers(types):
            return NotImplemented  # called again with what they wrap
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and not is_wrapper(leaf) and leaf.device.type != "meta":
                self.see(leaf.untyped_storage())
        return result

    @contextmanager
    def resizes(self):
        """See storages that are resized, which is no operator."""
        original = torch.UntypedStorage.resize_

        def resize_(storage, size):
            result = original(storage, size)
            self.see(storage)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize_):
            yield


def counted_peak(
    model,
    plan,
    step,
    mesh=None,
):
    """The most bytes alive on rank 0 of the plan's ranks in the second step: shards, buffers and
    all that comes on top.

    Args:
        model: real, not sharded; sharded here, in a fake world: its values become wrong, its sizes
            do not.
        plan: to shard it by.
        step: one forward and backward.
        mesh: of the plan, in the fake world that there is already.
    """
    storages = LiveStorages()
    world = fake_world(plan.mesh.size) if mesh is None else nullcontext()
    with world, storages.resizes(), storages:
        apply_plan(model, plan, mesh)
        step(model)  # makes what later ones reuse
        model.zero_grad()
        gc.collect()
        before = storages.peak = storages.live
        step(model)
        held = {local.untyped_storage() for local in map(_local, model.parameters())}
        held |= {buffer.untyped_storage() for buffer in model.buffers()}
        return storages.peak - before + sum(storage.nbytes() for storage in held)


def _local(param):
    return param.to_local() if isinstance(param, DTensor) else param


def held(model, optimizer=None):
    """Bytes of this rank by category, each storage once, and "on the CPU" what is offloaded of
    them.
    """
    params = [param for _, param in named_sharded_parameters(model)]
    first = next(iter(params), torch.empty(0))
    device = first.device_mesh.device_type if isinstance(first, DTensor) else first.device.type
    state = optimizer.state.values() if optimizer is not None else []
    tensors = {
        "parameters": [*params, *model.buffers()],
        "gradients": [param.grad for param in params],
        "optimizer": [leaf for entry in state for leaf in tree_leaves(entry)],
        "unsharded": gathered_tensors(model),
    }
    found = {"on the CPU": 0}
    for name, each in tensors.items():
        local = [
            _local(tensor)
            for tensor in each
            if isinstance(tensor, Tensor) and tensor.device.type != "meta"
        ]
        storages = {tensor.untyped_storage() for tensor in local}
        found[name] = sum(storage.nbytes() for storage in storages if storage.device.type == device)
        found["on the CPU"] += sum(
            storage.nbytes() for storage in storages if storage.device.type != device
        )
    return found


def predicted_held(row):
    """The same after a step, as predicted, without what the step itself makes and frees."""
    last = row.timeline[-1]
    found = {name: getattr(last, name) for name in ("parameters", "gradients", "unsharded")}
    return found | {"optimizer": row.timeline[0].optimizer}


def gathered_tensors(model):
    """Return the flat buffers that parameters are gathered into, with empty storages where
    resharded; those resharded over fewer ranks too.
    """
    params = [param for unit in fsdp_units(model) for param in unit.fsdp_params]
    found = [tensor for param in params for tensor in param.all_gather_outputs]
    for param in params:
        kept = getattr(param, "_sharded_post_forward_param_data", None)  # set by the first forward
        if kept is not None:
            found.append(kept)
    return found
