"""What FSDP2 has no counterpart for, with the way to do it instead."""

from __future__ import annotations

from typing import Any

from shardkit.errors import ShardkitError, TranslationError, message

_RULE = "FSDP2 has no flat parameters and no handles: each parameter is a DTensor of its own"

# Names of FSDP1's instances that programs have been seen to read, each with what to use instead.
INTERNALS = {
    "_flat_param": "Use model.parameters(), or param.to_local() for this rank's part of one",
    "flat_param": "Use model.parameters(), or param.to_local() for this rank's part of one",
    "_handle": "Use model.parameters(), or FSDP.summon_full_params(model) for full tensors",
    "_handles": "Use model.parameters(), or FSDP.summon_full_params(model) for full tensors",
    "_all_handles": "Use model.parameters(), or FSDP.summon_full_params(model) for full tensors",
    "_exec_order_data": "Set the order of gathering with set_modules_to_forward_prefetch of model.module",
    "_unshard_stream": "FSDP2 keeps its streams to itself; model.module.unshard() gathers",
    "_fully_sharded_module_to_handle": "Use FSDP.fsdp_modules(model)",
    "_all_fsdp_states": "Use FSDP.fsdp_modules(model)",
    "_comm_hook": "Use set_all_reduce_hook of model.module",
    "_comm_hook_state": "Use set_all_reduce_hook of model.module",
    "_sync_gradients": "Use model.no_sync(), or set_requires_gradient_sync of model.module",
    "_unshard": "Use model.module.unshard()",
    "_reset_lazy_init": "Leave it out: FSDP2 can be used before its first forward",
}
_PUBLIC = "Use a public method of FullyShardedDataParallel, or of FSDPModule on model.module"
INTERNALS |= dict.fromkeys(
    (
        "_all_reduce_stream",
        "_default_stream",
        "_deregister_orig_params_ctx",
        "_device_handle",
        "_free_event_queue",
        "_fsdp_extension",
        "_gradient_postdivide_factor",
        "_gradient_predivide_factor",
        "_optim_state_dict_impl",
        "_optim_state_dict_to_load_impl",
        "_post_backward_stream",
        "_pre_unshard_stream",
        "_use_training_state",
        "_wait_unshard_streams_on_current_stream",
    ),
    _PUBLIC,
)
# A name that a model may have itself: refused where it has none.
_NO_MODELS = {"params": "Use model.parameters(), or param.to_local() for this rank's part of one"}


class MissingInternal(TranslationError, AttributeError):
    """An AttributeError too, so that ``hasattr`` and ``getattr`` with a default keep working."""


class NotOnInner(ShardkitError, RuntimeError):
    """A RuntimeError too, as FSDP1's."""


def refuse(name: str) -> None:
    """Raise where ``name`` is one of FSDP1's internals.

    Raises:
        TranslationError: it is; also an AttributeError.
    """
    if name in INTERNALS:
        raise _missing(name, INTERNALS[name])


def attribute(module: object, name: str) -> Any:
    """The attribute of the wrapped module.

    Raises:
        AttributeError: it has none; also a TranslationError where FSDP1's wrapper had one.
    """
    try:
        return getattr(module, name)
    except AttributeError as error:
        if name in _NO_MODELS:
            raise _missing(name, _NO_MODELS[name]) from error
        raise


def _missing(name: str, fix: str) -> MissingInternal:
    return MissingInternal(message(name, "is an internal of FSDP1", _RULE, fix))


def not_on_an_inner_one(method: str) -> NotOnInner:
    """The error for a method of the root that was called on a wrapper inside of another one."""
    rule = f"`{method}` should only be called on the root FSDP instance"
    return NotOnInner(message(method, "on inner FSDP instances is not supported", rule, "Call it on the whole model"))


def comm_hook() -> TranslationError:
    """The error for FSDP1's communication hooks."""
    rule = "FSDP2 reduces gradients by unit and has no hook that takes a flat gradient"
    fix = (
        "Use shardkit.set_reduce_precision(model) for 16 bits on the wire, set_all_reduce_hook of model.module for "
        "HSDP, or set_custom_reduce_scatter"
    )
    return TranslationError(message("register_comm_hook", "has no counterpart", rule, fix))
