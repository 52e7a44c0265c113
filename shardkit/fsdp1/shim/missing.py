"""What FSDP2 has no counterpart for, with the way to do it instead."""

from __future__ import annotations

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
}


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
        raise MissingInternal(message(name, "is an internal of FSDP1", _RULE, INTERNALS[name]))


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
