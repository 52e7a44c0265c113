"""What FSDP2 has no counterpart for, with the way to do it instead."""

from __future__ import annotations

from typing import Any

from shardkit.errors import ShardkitError, TranslationError, message
from shardkit.fsdp1.instead import ATTRIBUTES, INTERNALS, MEMBERS

_RULE = "FSDP2 has no flat parameters and no handles: each parameter is a DTensor of its own"


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
        raise _missing(name)


def attribute(module: object, name: str) -> Any:
    """The attribute of the wrapped module.

    Raises:
        AttributeError: it has none; also a TranslationError where FSDP1's wrapper had one.
    """
    try:
        return getattr(module, name)
    except AttributeError as error:
        if name == "params":  # which a model may have itself
            raise _missing(name) from error
        raise


def _missing(name: str) -> MissingInternal:
    return MissingInternal(message(name, "is an internal of FSDP1", _RULE, ATTRIBUTES[name].fix()))


def not_on_an_inner_one(method: str) -> NotOnInner:
    """The error for a method of the root that was called on a wrapper inside of another one."""
    rule = f"`{method}` should only be called on the root FSDP instance"
    return NotOnInner(message(method, "on inner FSDP instances is not supported", rule, "Call it on the whole model"))


def comm_hook() -> TranslationError:
    """The error for FSDP1's communication hooks."""
    rule = "FSDP2 reduces gradients by unit and has no hook that takes a flat gradient"
    return TranslationError(
        message("register_comm_hook", "has no counterpart", rule, MEMBERS["register_comm_hook"].fix())
    )
