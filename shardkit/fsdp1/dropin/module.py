"""FullyShardedDataParallel: FSDP1's class over ``fully_shard``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from typing_extensions import Self

from shardkit import _fsdp, grads
from shardkit._fsdp.fsdp1 import accumulating_in_param_dtype
from shardkit._torch import sharded_parameters, sharded_stand_ins
from shardkit.errors import message
from shardkit.fsdp1.dropin import guards, optim_state, roots, state, tensors
from shardkit.fsdp1.dropin.construct import construct
from shardkit.fsdp1.dropin.record import (
    KEY,
    WRAPPED,
    Record,
    Unavailable,
    UnavailableAttribute,
    in_full_precision,
    inner_of,
    record_of,
    roots_of,
    sharded_of,
    without_wrappers,
    wrappers_of,
)
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.strategy import RESHARDING
from shardkit.replacements import ATTRIBUTES, MEMBERS
from shardkit.shards import device_of

# FSDP1's settings, which are never None.
_OF_RECORD: dict[str, Callable[[Record], Any]] = {
    "process_group": lambda record: record.process_group,
    "rank": lambda record: record.process_group.rank(),
    "world_size": lambda record: record.process_group.size(),
    "sharding_strategy": lambda record: record.strategy,
    "cpu_offload": lambda record: record.given.cpu_offload or CPUOffload(),
    "backward_prefetch": lambda record: record.given.backward_prefetch,
    "forward_prefetch": lambda record: bool(record.given.forward_prefetch),
    "limit_all_gathers": lambda record: bool(record.given.limit_all_gathers),
    "compute_device": lambda record: device_of(record.mesh),
    "_use_orig_params": lambda record: bool(record.given.use_orig_params),
    "_state_dict_type": lambda record: record.state_dict_settings.state_dict_type,
}


_BY_NAME = "optim_state_dict gives state by name, and optim_state_dict_to_load by number"


def _refusing(name: str, rule: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        """Raise Unavailable, which names the replacement."""
        raise Unavailable(message(name, "is not supported", rule, MEMBERS[name].fix()))

    return refuse


class FullyShardedDataParallel(nn.Module):
    """FSDP1's wrapper on FSDP2: an FSDP1 program runs on ``fully_shard`` after changing one import.

    Takes the arguments of ``torch.distributed.fsdp.FullyShardedDataParallel``; ``translate_fsdp1`` reports how each is
    translated. ``module`` is sharded in place, and each part that the policy chooses becomes the ``module`` of a
    wrapper of its own, as in FSDP1. Names of parameters are always those of the plain model. Collective.

    Args:
        module: the model, or, when wrapping by hand, a part of it; inner parts first.

    Raises:
        TranslationError: on every rank, with the model unchanged: FSDP1 would refuse the arguments too, or FSDP2
            cannot do what they ask for.

    Examples:
        >>> from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
        >>> model = FSDP(model, auto_wrap_policy=policy)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        _adopt(self, module, construct(module, Arguments.of(locals()), _around))
        guards.install(FullyShardedDataParallel)

    @property
    def module(self) -> nn.Module:
        """Return the wrapped module, also where ``checkpoint_wrapper`` was put around it later."""
        return inner_of(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return _attribute(self, super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        return self._modules[WRAPPED][key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward. Collective."""
        roots.begin_forward(self)
        return self._modules[WRAPPED](*args, **kwargs)  # type: ignore[misc]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield itself and all modules below, by their names in the plain model. Local.

        A wrapper and its module share a name, so that a parameter's name is that of its module and an attribute.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, child in self._modules.items():
            below = prefix if name == WRAPPED else f"{prefix}.{name}".lstrip(".")
            if child is not None:
                yield from child.named_modules(memo, below, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the sharded parameters, by their names in the plain model. Local, also between forward and backward."""
        sharded = sharded_stand_ins(self.modules())
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield without_wrappers(name), sharded.get(param, param)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers, by their names in the plain model."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield without_wrappers(name), buffer

    def check_is_root(self) -> bool:
        """Return whether it is the root. Before the first forward this makes it the root, as in FSDP1."""
        return roots.begin(self)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers at and below ``module``, parents first. Local."""
        found: list[Any] = roots_of(module) if root_only else wrappers_of(module)
        return found

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the first backward after this context reduces the sum. Local.

        As in FSDP1, gradients are added up in ``param_dtype``, and SHARD_GRAD_OP gathers parameters once a step.
        Inside, ``p.grad`` can be cleared, and any other use raises; FSDP1 showed full-size gradients there.
        """
        roots.begin(self)
        sharded = sharded_of(self)
        if sharded is not None:
            _fsdp.initialize(sharded)
        with accumulating_in_param_dtype(self), grads.no_sync(self):
            if sharded is not None and record_of(self).strategy.name in RESHARDING:
                sharded.set_reshard_after_backward(True, recurse=False)  # the root too, which forward leaves gathered
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as ``nn.Module`` does, also those that ``no_sync`` has accumulated. Local."""
        if set_to_none:
            grads.zero_grad(self)
        else:
            super().zero_grad(set_to_none=False)

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> Tensor:
        """Scale the gradients to a norm of at most ``max_norm``, in place, and return the norm. Collective.

        Returns:
            The norm of all gradients as one vector: a 0-d plain tensor in the dtype that they promote to, equal on
            all ranks.
        """
        roots.begin(self)
        params = sharded_parameters(self)
        dtypes = [param.grad.dtype for param in params if param.grad is not None]
        tensors.as_dtensors(params)
        norm = grads.clip_grad_norm_(params, float(max_norm), float(norm_type))
        tensors.as_gradients(params)
        return norm.to(functools.reduce(torch.promote_types, dtypes)) if dtypes else norm

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the model's state by the names of the plain model. Collective for FULL_STATE_DICT.

        In the form that ``set_state_dict_type`` chose: FULL_STATE_DICT, the default, gives plain tensors in memory of
        their own on every rank, or with ``rank0_only`` nothing on all but the lowest; SHARDED_STATE_DICT gives copies
        of the DTensors, and LOCAL_STATE_DICT DTensors in the parameters' own memory. ``load_state_dict`` takes all of
        them, and FSDP1's ShardedTensors.
        """
        return state.state_dict(self, destination, prefix, keep_vars)

    summon_full_params = staticmethod(state.summon_full_params)
    set_state_dict_type = staticmethod(state.set_state_dict_type)
    get_state_dict_type = staticmethod(state.get_state_dict_type)
    state_dict_type = staticmethod(state.state_dict_type)

    def _fqn_modifiers(self) -> dict[str, str]:
        # torch.distributed.checkpoint asks behind which attribute each name of the wrapped module is found.
        inner: Any = self._modules[WRAPPED]
        return dict.fromkeys((*inner._modules, *inner._parameters, *inner._buffers), WRAPPED)

    optim_state_dict = staticmethod(optim_state.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_state.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optim_state.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_state.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_state.shard_full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_state.scatter_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_state.flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = staticmethod(_refusing("rekey_optim_state_dict", _BY_NAME))

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` with each module, children first, on full parameters, and keep what it writes. Collective."""
        state.apply(self, fn)
        return self

    register_comm_hook = _refusing("register_comm_hook", "FSDP2 has no hook that takes a flat gradient")


def _around(module: nn.Module, record: Record) -> FullyShardedDataParallel:
    """Return a wrapper around a module that is sharded already."""
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    _adopt(wrapper, module, record)
    return wrapper


def _adopt(wrapper: FullyShardedDataParallel, module: nn.Module, record: Record) -> None:
    vars(wrapper)[KEY] = record
    wrapper.training = module.training
    wrapper.register_module(WRAPPED, module)
    state.attach(wrapper)
    tensors.adopt(module)


def _attribute(wrapper: nn.Module, module: object, name: str) -> Any:
    """Return FSDP1's attribute of that name, or the wrapped module's."""
    record = record_of(wrapper)
    if name in _OF_RECORD:
        return _OF_RECORD[name](record)
    if name == "mixed_precision":
        return MixedPrecision() if in_full_precision(wrapper) else record.mixed_precision
    try:
        return getattr(module, name)
    except AttributeError:
        if name not in ATTRIBUTES:
            raise
        rule = "FSDP2 has no flat parameters and no handles: each parameter is a DTensor of its own"
        text = message(name, "is an internal of FSDP1", rule, ATTRIBUTES[name].fix())
        raise UnavailableAttribute(text) from None
