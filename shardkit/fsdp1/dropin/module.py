"""FullyShardedDataParallel: FSDP1's class over ``fully_shard``.

As ``fully_shard`` does, a call shards a module in place and gives it methods by another class. There
is no wrapper around it, so its names, its children and its methods stay what they are.
"""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from typing_extensions import Self

from shardkit import _fsdp, grads
from shardkit._fsdp.fsdp1 import accumulating_in_param_dtype
from shardkit._torch import sharded_parameters, sharded_stand_ins
from shardkit.errors import message
from shardkit.fsdp1.dropin import guards, optim_state, state, tensors
from shardkit.fsdp1.dropin.construct import construct
from shardkit.fsdp1.dropin.record import (
    KEY,
    Record,
    Unavailable,
    UnavailableAttribute,
    is_wrapped,
    record_of,
    roots_in,
    wrapped_in,
)
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.strategy import RESHARDING
from shardkit.shards import device_of

# Attributes of FSDP1's wrappers that programs read, where the module has none of that name.
_ATTRIBUTES: dict[str, Callable[[nn.Module, Record], Any]] = {
    "module": lambda module, record: _unwrapped(module),
    "_fsdp_wrapped_module": lambda module, record: _unwrapped(module),
    "process_group": lambda module, record: record.process_group,
    "rank": lambda module, record: record.process_group.rank(),
    "world_size": lambda module, record: record.process_group.size(),
    "sharding_strategy": lambda module, record: record.strategy,
    "mixed_precision": lambda module, record: record.precision,
    "cpu_offload": lambda module, record: record.given.cpu_offload or CPUOffload(),
    "backward_prefetch": lambda module, record: record.given.backward_prefetch,
    "forward_prefetch": lambda module, record: bool(record.given.forward_prefetch),
    "limit_all_gathers": lambda module, record: bool(record.given.limit_all_gathers),
    "compute_device": lambda module, record: device_of(record.mesh),
    "_use_orig_params": lambda module, record: bool(record.given.use_orig_params),
    "_state_dict_type": lambda module, record: record.state_dict_settings.state_dict_type,
}


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the same module without FSDP1's methods, for ``while isinstance(m, FSDP): m = m.module``.

    It has the same ``__dict__``, so that all is shared but the class.
    """
    cls: Any = type(module)
    inner: nn.Module = object.__new__(cls.plain_class)
    inner.__dict__ = module.__dict__
    return inner


class FSDP1Methods(nn.Module):
    """The methods that a module has after ``FullyShardedDataParallel(module)``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _ATTRIBUTES:
                return _ATTRIBUTES[name](self, record_of(self))
            if name not in dir(TorchFSDP) and not name.startswith(("_handle", "_flat_param", "_all")):
                raise
        rule = "FSDP2 has no flat parameters, handles or streams: each parameter is a DTensor"
        fix = "Use model.parameters(), or module.reshard() and other methods of FSDPModule"
        raise UnavailableAttribute(message(name, "is an internal of FSDP1", rule, fix))

    summon_full_params = staticmethod(state.summon_full_params)
    set_state_dict_type = staticmethod(state.set_state_dict_type)
    get_state_dict_type = staticmethod(state.get_state_dict_type)
    state_dict_type = staticmethod(state.state_dict_type)
    optim_state_dict = staticmethod(optim_state.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_state.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optim_state.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_state.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_state.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_state.scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_state.flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_state.rekey_optim_state_dict)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        """Return the wrapped modules at and below ``module``, parents first. Local."""
        return roots_in(module) if root_only else wrapped_in(module)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the sharded parameters, also between forward and backward. Local."""
        sharded = sharded_stand_ins(self.modules())
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name, sharded.get(param, param)

    def check_is_root(self) -> bool:
        """Return whether it is in no other wrapped module."""
        return record_of(self).is_root

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the next backward reduces the sum. Local.

        As in FSDP1, gradients are added up in ``param_dtype``, and SHARD_GRAD_OP gathers once a
        step. Inside, ``p.grad`` is None; FSDP1 showed full-size gradients there.
        """
        if isinstance(self, FSDPModule):
            _fsdp.initialize(self)
        with accumulating_in_param_dtype(self), grads.no_sync(self):
            if isinstance(self, FSDPModule) and record_of(self).strategy.name in RESHARDING:
                self.set_reshard_after_backward(True, recurse=False)
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those that ``no_sync`` has accumulated. Local."""
        if set_to_none:
            grads.zero_grad(self)
        else:
            super().zero_grad(set_to_none=False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients to a norm of at most ``max_norm``; return the norm. Collective.

        The norm of all gradients as one vector: a plain tensor in the dtype that they promote to.
        """
        params = sharded_parameters(self)
        dtypes = [param.grad.dtype for param in params if param.grad is not None]
        tensors.as_dtensors(params)
        norm = grads.clip_grad_norm_(params, float(max_norm), float(norm_type))
        tensors.as_gradients(params)
        return norm.to(functools.reduce(torch.promote_types, dtypes)) if dtypes else norm

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the model's state as ``state_dict_type`` says. Collective for FULL_STATE_DICT.

        FULL_STATE_DICT, the default, gives plain tensors on every rank, or with ``rank0_only``
        nothing on all but the lowest; SHARDED_STATE_DICT gives copies of the DTensors, and
        LOCAL_STATE_DICT DTensors in the parameters' own memory. ``load_state_dict`` takes all.
        """
        return state.state_dict(self, destination, prefix, keep_vars)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` with each module, on full parameters, and keep what it writes. Collective."""
        with state.summon_full_params(self):
            return super().apply(fn)

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        """Raise Unavailable."""
        rule = "FSDP2 has no hook that takes a flat gradient"
        fix = "Use set_custom_reduce_scatter or set_all_reduce_hook of each FSDPModule"
        raise Unavailable(message("register_comm_hook", "is not supported", rule, fix))


class _Shards(abc.ABCMeta):  # as the class of checkpoint_wrapper has it
    """A call of the class shards a module in place and returns it, with the class mixed in."""

    def __call__(cls, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if hasattr(cls, "plain_class"):  # of a sharded module, as where a ModuleList is sliced
            return cls.plain_class(module, *args, **kwargs)
        if not is_wrapped(module):
            before: Any = type(module)
            module.__class__ = _mixed(cls, before)
            try:
                cls.__init__(module, module, *args, **kwargs)  # type: ignore[misc]  # of the mixed class
            except BaseException:
                module.__class__ = before
                raise
        guards.install(FullyShardedDataParallel)
        return module


@functools.cache
def _mixed(cls: type, plain: type) -> Any:
    return type(cls)(plain.__name__, (cls, plain), {"plain_class": plain, "__doc__": plain.__doc__})


class FullyShardedDataParallel(FSDP1Methods, metaclass=_Shards):
    """FSDP1's class on FSDP2: a program for it runs on ``fully_shard`` after changing one import.

    Takes the arguments of ``torch.distributed.fsdp.FullyShardedDataParallel``; ``translate_fsdp1``
    says what becomes of each. ``module`` is sharded in place and returned, with FSDP1's methods,
    and so has each part that the policy chooses. Collective.

    Raises:
        TranslationError: on every rank, with the model unchanged: FSDP1 would refuse the arguments
            too, or FSDP2 cannot do what they ask for.

    Examples:
        >>> from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
        >>> model = FSDP(model, auto_wrap_policy=policy)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """

    __signature__ = inspect.signature(TorchFSDP)

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = self.__signature__.bind(module, *args, **kwargs).arguments
        for each, record in construct(module, Arguments.of(given)).items():
            vars(each)[KEY] = record
            if each is not module:
                plain: Any = type(each)
                each.__class__ = _mixed(FullyShardedDataParallel, plain)
            state.attach(each)
            tensors.adopt(each)
        module.register_forward_pre_hook(tensors.check_own_dtype, prepend=True)
