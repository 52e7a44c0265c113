"""Every private torch name and every torch version check, each with the reason it is needed.

Besides ``_fsdp``, no other module of shardkit uses a torch name with an underscore (``tests/house/test_layers.py``).
When a new torch breaks shardkit, look here first.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

with warnings.catch_warnings():
    # On import torch warns where numpy is missing, which neither torch nor shardkit needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# testing: sees every collective that is dispatched; meta: every aten call of a construction. The module has an
# underscore, yet the class is the documented way to intercept operators, and CommDebugMode is built on it.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from shardkit.errors import ShardkitError, message

MINIMUM_TORCH = (2, 11)
NEWEST_TESTED = (2, 15)
# checkpoint: the number of groups becomes part of the name of a local new_group.
process_groups = torch.distributed.distributed_c10d._world


def torch_version() -> tuple[int, int]:
    """Return the major and minor version of torch, such as ``(2, 13)``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if torch_version() < MINIMUM_TORCH:
    raise ImportError(
        f"torch: version {torch.__version__} is too old. shardkit needs torch >= "
        f"{'.'.join(map(str, MINIMUM_TORCH))}. Upgrade with: pip install --upgrade torch."
    )

if torch_version() > NEWEST_TESTED:
    untested = "torch %s is newer than %s.%s, the newest that shardkit is tested with"
    logging.getLogger("shardkit").debug(untested, torch.__version__, *NEWEST_TESTED)


def missing_name(path: str) -> ShardkitError:
    """Return the error for a private name that this torch does not have."""
    rule = "This function of shardkit needs it, and is tested with torch {}.{} to {}.{}"
    rule = rule.format(*MINIMUM_TORCH, *NEWEST_TESTED)
    fix = "Use one of these, or a newer shardkit; `python -m shardkit.testing.torch_names` lists all missing names"
    return ShardkitError(message(path, f"torch {torch.__version__} does not have it", rule, fix))


def _private(path: str) -> Any:
    """Return a private function of torch, or, if there is none, one that raises when called, so that the rest works."""

    def absent(*_: object, **__: object) -> NoReturn:
        raise missing_name(path)

    try:
        return operator.attrgetter(path.removeprefix("torch."))(torch)
    except AttributeError:
        return absent


# apply: torch 2.11 makes each shard a parameter that requires grad, which integers cannot ("only Tensors of floating
# point dtype can require gradients"), and casts integers to param_dtype; 2.13 does neither.
SHARDS_INTEGERS = torch_version() >= (2, 13)


# grads: one kernel for many tensors, as in torch.nn.utils.clip_grad_norm_; no public names (torch 2.11 to 2.15).
foreach_norm = _private("torch._foreach_norm")
foreach_mul_ = _private("torch._foreach_mul_")


def by_device_and_dtype(tensors: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Return the local tensors in groups that one such kernel accepts."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            groups.setdefault((local.device, local.dtype), []).append(local)
    return list(groups.values())


def named_sharded_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return ``model.named_parameters()``, with each gathered parameter replaced by its sharded one. Local.

    Between an unshard and a reshard FSDP2 registers unsharded parameters, while gradients and the optimizer's
    entries stay with the sharded ones, which torch has no public way to reach (2.11 to 2.15).
    """
    sharded = sharded_stand_ins(model.modules())
    return [(name, sharded.get(param, param)) for name, param in model.named_parameters()]


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return ``model.parameters()``, with each gathered parameter replaced by its sharded one. Local.

    Every clip asks; with their names it would take three times as long.
    """
    modules = list(model.modules())
    sharded = sharded_stand_ins(modules)
    found = dict.fromkeys(param for module in modules for param in module._parameters.values())
    return [sharded.get(param, param) for param in found if param is not None]


def sharded_stand_ins(modules: Iterable[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
    """Return the sharded parameter for each unsharded one that these modules register at present. Local."""
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        for unit in units_of(module._get_fsdp_state()) if isinstance(module, FSDPModule) else ():
            for fsdp_param in () if unit.is_sharded else unit.fsdp_params:
                info = fsdp_param._module_info
                sharded[getattr(info.module, info.param_name)] = fsdp_param.sharded_param
    return sharded


def _fsdp_params(module: FSDPModule) -> list[Any]:
    return [param for unit in units_of(module._get_fsdp_state()) for param in unit.fsdp_params]


def units_of(state: Any) -> list[Any]:
    """Return the ``FSDPParamGroup`` objects of an FSDP module's state: several since torch 2.12, before one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


# testing: otherwise each forked rank imports these in its first forward (``torch._dynamo``: 0.5 to 2 s).
RANK_IMPORTS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")


def fake_store() -> Any:
    """Return a store for the ``fake`` backend, which this import registers (else "Unknown c10d backend type")."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def in_backward() -> bool:
    """Return whether this thread runs a backward, as where a forward is recomputed. Local."""
    return torch._C._current_graph_task_id() != -1


def store_of_its_own(prefix: str) -> Any:
    """Return a client to the store of the default process group that another thread does not keep waiting."""
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    return torch.distributed.distributed_c10d.PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)


def forget_meshes() -> None:
    """Empty DTensor's caches, which are keyed by meshes that compare equal although their groups differ.

    Otherwise the next world of the same shape gets tensors on the previous mesh: "Could not resolve the process group
    registered under the name 5" (torch 2.11 to 2.15).
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


# meta: a lazy negation is a bit on the tensor, which set_() on a storage does not restore; no public setter.
neg_view = _private("torch._neg_view")
# meta: TorchFunctionMode stays active inside of __torch_dispatch__; only this private context disables it.
no_torch_function = torch._C.DisableTorchFunction


# apply: there is no public way to suspend FakeTensorMode (torch 2.11 to 2.13).
real_tensors = torch._subclasses.fake_tensor.unset_fake_temporarily


@contextmanager
def no_modes() -> Iterator[None]:
    """Run the body without any dispatch or function modes, including ours."""
    with torch.utils._python_dispatch._disable_current_modes(), no_torch_function():
        yield


# What a __torch_dispatch__ sees of Tensor.to() with another dtype or device; no public name (torch 2.11 to 2.15).
TO_COPY = torch.ops.aten._to_copy.default


def has_own_dispatch(cls: type) -> bool:
    """Return whether a tensor class wraps other tensors (DTensor, quantized weights) instead of its own storage."""
    own = getattr(cls, "__torch_dispatch__", None)
    return own not in (torch._C._disabled_torch_dispatch_impl, getattr(Tensor, "__torch_dispatch__", None))


def schema(op: Any) -> Any:
    """Return the schema of an aten op, with the names of its arguments and which it writes to; no public access."""
    return op._schema


def arguments_by_name(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator by the names of its schema; those left out are missing."""
    return dict(zip((each.name for each in schema(op).arguments), args, strict=False)) | kwargs


def has_tag(op: Any, name: str) -> bool:
    """Return whether an aten op has the tag of that name, such as ``nondeterministic_seeded``."""
    return getattr(torch.Tag, name) in op.tags


@contextmanager
def recorded_samplers(record: Callable[..., None]) -> Iterator[None]:
    """Inside of the block ``torch.nn.init.trunc_normal_`` on a meta tensor is one call of ``record``.

    It draws until every value is in range (torch 2.13), so its aten calls depend on values. Should torch rename the
    function, those calls are recorded instead, which is slower and as exact.
    """
    name = "_no_grad_trunc_normal_"
    original = getattr(torch.nn.init, name, None)
    if original is None:
        yield
        return

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
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    return cast(torch.Generator, module.default_generators[index])


def accelerator_state() -> Tensor | None:
    """Return the state of the accelerator's default generator; None without one, or before its first use."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not getattr(torch.get_device_module(accelerator), "is_initialized", bool)():
        return None
    return default_generator(accelerator).get_state()


def offloaded_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """Return the sharded parameters of this FSDP module that are offloaded to the CPU."""
    return [param.sharded_param for param in _fsdp_params(module) if param.offload_to_cpu]


def reread_sharded_parameters(module: FSDPModule) -> None:
    """Make FSDP2 use the replaced local shards of this module, as its ``_apply`` does after ``to_empty``.

    ``_apply`` itself would also rewrap every parameter, which drops attributes that users set on them.
    """
    for param in _fsdp_params(module):
        param.reset_sharded_param()


# memory: FSDP2's hooks map over arguments and outputs with torch's pytree, with the types that libraries registered
# (transformers' ModelOutput); torch 2.13 has no public name for it.
tree_leaves = torch.utils._pytree.tree_leaves
tree_map = torch.utils._pytree.tree_map
# memory: tensors with shapes but no data; torch documents them and exports no public name (2.11 to 2.13).
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
FakeTensor = torch._subclasses.fake_tensor.FakeTensor


def state_dict_metadata(state_dict: Any) -> dict[str, Any]:
    """Return the module versions that ``nn.Module.state_dict`` attaches to its result; empty if there are none."""
    return getattr(state_dict, "_metadata", None) or {}


def with_state_dict_metadata(state_dict: Any, metadata: dict[str, Any]) -> Any:
    """Attach the result of :func:`state_dict_metadata` where ``nn.Module.load_state_dict`` looks for it."""
    state_dict._metadata = OrderedDict(metadata)
    return state_dict


def with_local(like: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor placed like another, with this local tensor on any device, which ``from_local`` would move."""
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


# optim, grads: reading an attribute of a DTensor such as .grad or .dtype asks __torch_function__ first, which costs
# more than the attribute: 0.5 us against 0.05 (torch 2.13). This context avoids that; modes stay active.
plain_attributes = torch._C.DisableTorchFunctionSubclass


# optim, grads: ``to_local()`` makes an autograd node, 10 us; the attribute that it reads costs 0.03. FSDP2 itself sets
# it (torch 2.11 and 2.13). The result of a redistribution may still be in flight: call ``to_local()`` there.
local_tensor: Callable[[DTensor], Tensor] = operator.attrgetter("_local_tensor")
# The number of in-place writes to a tensor or its views, with which autograd checks saved tensors.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")


def local_tensors(
    tensors: list[Any], params: list[Any], layouts: list[Any], otherwise: Callable[[DTensor, Any], Tensor]
) -> list[Any]:
    """Return the local tensor of each DTensor placed like its parameter, and other tensors unchanged. Local.

    Args:
        tensors: gradients or state, in the order of ``params``.
        params: the parameters.
        layouts: their placements; None for plain parameters.
        otherwise: called with a DTensor of other placements and its parameter; returns its local tensor.
    """
    # One comprehension without calls, because this runs for every tensor in every step.
    return [
        x if not isinstance(x, DTensor) else x._local_tensor if x._spec.placements == layout else otherwise(x, param)
        for x, param, layout in zip(tensors, params, layouts, strict=True)
    ]


# optim: torch's optimizers collect the tensors of a step in this method: it appends each parameter's to a list of
# parameters, one of gradients, and one for each kind of state that the update needs (torch 2.11 and 2.13).
COLLECT = "_init_group"


def make_adagrad_state(optimizer: torch.optim.Optimizer) -> None:
    """Give a copy of an Adagrad without state its initial state, which torch 2.11 makes only when it is constructed."""
    if isinstance(optimizer, torch.optim.Adagrad):
        value = optimizer.defaults.get("initial_accumulator_value", 0.0)
        torch.optim.Adagrad.__init__(optimizer, optimizer.param_groups, initial_accumulator_value=value)


def count_for_schedulers(step: Any) -> None:
    """Mark a step function as wrapped by an LR scheduler; it must then call :func:`note_step`.

    Otherwise a scheduler replaces ``optimizer.step`` with a wrapper around the class's function (torch 2.11 to 2.15).
    """
    step._wrapped_by_lr_sched = True


def counts_for_schedulers(step: Any) -> bool:
    """Return whether ``optimizer.step`` is an LR scheduler's wrapper, or marked as one."""
    return hasattr(step, "_wrapped_by_lr_sched")


def note_step(optimizer: Any) -> None:
    """Do what an LR scheduler's wrapper does besides stepping; otherwise the scheduler warns of a wrong order."""
    optimizer._opt_called = True


# optim: with this attribute GradScaler leaves infs to the step; otherwise it asserts that there were gradients.
SCALES_ITSELF = "_step_supports_amp_scaling"


# optim: torch 2.11 copies the gradient of an offloaded shard to pinned memory without waiting, although a hook reads it
# at once; 2.13 waits if there is such a hook (``foreach_reduce`` in ``_fsdp_collectives.py``).
OFFLOAD_WAITS_FOR_HOOKS = torch_version() >= (2, 13)


def steps_in_backward(parameters: Iterable[Tensor]) -> bool:
    """Return whether ``optimizer_in_backward`` steps any of the parameters, so that they never keep a gradient.

    Its hook has an attribute for this; torch has no public way to list hooks (2.11 to 2.15).
    """
    hooks = (hook for param in parameters for hook in (param._post_accumulate_grad_hooks or {}).values())
    return any(getattr(hook, "steps_in_backward", False) for hook in hooks)


# checkpoint: whether a tensor has ``__tensor_flatten__`` and ``__tensor_unflatten__``, as DTensors do too.
is_wrapper: Callable[[Tensor], bool] = torch.utils._python_dispatch.is_traceable_wrapper_subclass

# optim, grads: ``DTensor.placements`` without the property, in a third of the time; and the spec, with the mesh.
placements: Callable[[DTensor], tuple[Any, ...]] = operator.attrgetter("_spec.placements")
layout_of: Callable[[DTensor], Any] = operator.attrgetter("_spec")


# grads: the kernel of torch.amp.GradScaler, for plain tensors of one device and dtype.
amp_unscale_ = _private("torch._amp_foreach_non_finite_check_and_unscale_")


class UnscalingGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose subclasses implement :meth:`unscale_grads`.

    ``unscale_`` and ``step`` call ``_unscale_grads_`` (torch 2.11 to 2.15); torch has no public way to replace it.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        return {found_inf.device: self.unscale_grads(optimizer, inv_scale, found_inf, allow_fp16)}

    def unscale_grads(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Tensor:
        """Multiply all gradients by ``inv_scale``; return 1.0 if any rank has a non-finite one, else 0.0."""
        raise NotImplementedError
