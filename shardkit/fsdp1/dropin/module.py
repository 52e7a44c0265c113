"""FullyShardedDataParallel: FSDP1's class over ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from typing_extensions import Self

from shardkit import _fsdp
from shardkit._fsdp.fsdp1 import (
    asked_by_checkpoint,
    optimizers_in_backward,
)
from shardkit._fsdp.plain import as_dtensors, plain_of_unsharded, plain_units, update_dtensors
from shardkit.fsdp1.dropin import clip, guards, optim_state, state
from shardkit.fsdp1.dropin.construct import shard_and_wrap
from shardkit.fsdp1.dropin.record import (
    KEY,
    WRAPPED,
    Record,
    Unavailable,
    UnavailableAttribute,
    inner_of,
    record_of,
    without_wrappers,
    wrappers_of,
)
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.strategy import RESHARDING
from shardkit.shards import device_of

# Attributes of FSDP1's wrappers that programs read.
_ATTRIBUTES: dict[str, Callable[[Record], Any]] = {
    "process_group": lambda record: record.process_group,
    "rank": lambda record: record.process_group.rank(),
    "world_size": lambda record: record.process_group.size(),
    "sharding_strategy": lambda record: record.strategy,
    "mixed_precision": lambda record: record.precision,
    "cpu_offload": lambda record: record.given.cpu_offload or CPUOffload(),
    "backward_prefetch": lambda record: record.given.backward_prefetch,
    "forward_prefetch": lambda record: bool(record.given.forward_prefetch),
    "limit_all_gathers": lambda record: bool(record.given.limit_all_gathers),
    "compute_device": lambda record: device_of(record.mesh),
    "_use_orig_params": lambda record: bool(record.given.use_orig_params),
    "_state_dict_type": lambda record: record.state_dict_settings.state_dict_type,
    # accelerate upcasts flat parameters, which there are none of
    "_has_params": lambda record: False,
}


class FullyShardedDataParallel(nn.Module):
    """FSDP1's wrapper on FSDP2: a program for it runs on ``fully_shard`` after changing one import.

    Takes the arguments of ``torch.distributed.fsdp.FullyShardedDataParallel``; ``translate_fsdp1``
    says what becomes of each. ``module`` is sharded in place, and each part that the policy chooses
    becomes the ``module`` of a wrapper of its own. Collective.

    Parameters are plain tensors with one dim, each rank's part of them, as in FSDP1 with
    ``use_orig_params=True``: the same objects as before, with the same names. Each is divided by
    itself, so that ranks have other parts than in FSDP1. ``use_orig_params=False`` shows them too,
    and no flat parameter.

    Raises:
        TranslationError: on every rank, with the model unchanged: FSDP1 would refuse the arguments
            too, or FSDP2 cannot do what they ask for.

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
        record = shard_and_wrap(module, Arguments.of(locals()), _wrap)
        _adopt(self, module, record)
        guards.install(FullyShardedDataParallel)

    @property
    def module(self) -> nn.Module:
        """Return the wrapped module, also where ``checkpoint_wrapper`` was put around it later."""
        return inner_of(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        if name in _ATTRIBUTES:
            return _ATTRIBUTES[name](record_of(self))
        try:
            return getattr(super().__getattr__(WRAPPED), name)
        except AttributeError:
            if name not in dir(TorchFSDP) and not name.startswith(
                ("_handle", "_flat_param", "_all_")
            ):
                raise
        raise UnavailableAttribute(
            f"{name} is an internal of FSDP1: FSDP2 has no flat parameters and no handles. Use "
            "model.parameters(), each rank's part of each, FSDP.summon_full_params(model), or "
            "model.module.reshard() to free full parameters."
        )

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward. Collective."""
        record = record_of(self)
        if record.is_root:
            self._begin()
            update_dtensors(record.units)
        return self._modules[WRAPPED](*args, **kwargs)  # type: ignore[misc]

    @_fsdp.not_compiled
    def _begin(self) -> None:
        """Before the first forward or ``no_sync``, when no wrapper will come around this one any
        more.
        """
        record, sharded = record_of(self), inner_of(self)
        if record.has_run:
            return
        record.has_run = True
        record.units = plain_units(self)
        if isinstance(sharded, FSDPModule):
            with as_dtensors(self):
                _fsdp.initialize(sharded)  # which finds the names of its parameters
        if any(optimizers_in_backward(param) for param in self.parameters()):
            raise Unavailable(
                "_apply_optimizer_in_backward was called on the parameters, but FSDP2 does not "
                "step such optimizers, so nothing would train. Step an optimizer after the "
                "backward."
            )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's part of each parameter, also between forward and backward. Local.

        As in FSDP1, the names have ``_fsdp_wrapped_module``, but in ``summon_full_params``, and for
        ``torch.distributed.checkpoint``, which knows this of torch's class only.
        """
        plain = plain_of_unsharded(self)
        clean = record_of(self).summoned or asked_by_checkpoint()
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield without_wrappers(name) if clean else name, plain.get(param, param)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers. Local."""
        clean = record_of(self).summoned or asked_by_checkpoint()
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield without_wrappers(name) if clean else name, buffer

    def check_is_root(self) -> bool:
        """Return whether no other wrapper is around this one."""
        return record_of(self).is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers at and below ``module``, parents first. Local."""
        wrappers: list[Any] = []
        for wrapper in wrappers_of(module):
            if record_of(wrapper).is_root or not root_only:
                wrappers.append(wrapper)
        return wrappers

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the first backward after it reduces the sum.

        As in FSDP1, gradients are added up in ``param_dtype``, and SHARD_GRAD_OP all-gathers
        parameters once a step. Until they are reduced ``p.grad`` is zeros, where FSDP1 showed full
        gradients; ``zero_grad()`` drops them. Local.
        """
        if record_of(self).is_root:
            self._begin()
        reshards = record_of(self).strategy.name in RESHARDING
        before = []
        for unit in plain_units(self):
            before.append((unit, unit.reduce_grads, unit.reshard_after_backward))
            unit.reduce_grads = False
            unit.reshard_after_backward = reshards
        try:
            yield
        finally:
            for unit, reduces, reshards in before:
                unit.reduce_grads, unit.reshard_after_backward = reduces, reshards

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> Tensor:
        """Scale the gradients to a norm of at most ``max_norm``, in place, and return the norm.

        The norm is that of the gradients of all ranks as one vector: a 0-d tensor in the dtype that
        they promote to, equal on all ranks. Collective.
        """
        return clip.clip_grad_norm_(self, float(max_norm), float(norm_type))

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the model's state by the names of the plain model. Collective for FULL_STATE_DICT.

        In the form that ``set_state_dict_type`` chose: FULL_STATE_DICT, the default, gives copies
        of full tensors on every rank, or with ``rank0_only`` nothing on all but the lowest;
        SHARDED_STATE_DICT copies of DTensors, and LOCAL_STATE_DICT the DTensors themselves.
        ``load_state_dict`` takes all of them, and FSDP1's ShardedTensors.
        """
        return state.state_dict(self, destination, prefix, keep_vars)

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

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` with each module, children first, on full parameters, and keep what it
        writes.
        """
        with state.summon_full_params(self):
            return super().apply(fn)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Raise: FSDP2 has no hook that takes a flat gradient."""
        raise Unavailable(
            "register_comm_hook is not supported: FSDP2 has no hook for a flat gradient. Use "
            "set_custom_reduce_scatter or set_all_reduce_hook of model.module."
        )

    def _fqn_modifiers(self) -> dict[str, str]:
        # torch.distributed.checkpoint asks behind which attribute it finds each name below.
        inner: Any = self._modules[WRAPPED]
        return dict.fromkeys((*inner._modules, *inner._parameters, *inner._buffers), WRAPPED)


def _wrap(module: nn.Module, record: Record) -> FullyShardedDataParallel:
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
