"""Errors that are also of the class that FSDP1 raised, because programs catch that one."""

from __future__ import annotations

from shardkit.errors import ShardkitError, TranslationError


class DropinRuntimeError(ShardkitError, RuntimeError):
    """A RuntimeError too."""


class DropinValueError(ShardkitError, ValueError):
    """A ValueError too."""


class DropinTypeError(ShardkitError, TypeError):
    """A TypeError too."""


class DropinKeyError(ShardkitError, KeyError):
    """A KeyError too, whose message is shown without quotes."""

    __str__ = Exception.__str__


class DropinAssertionError(ShardkitError, AssertionError):
    """An AssertionError too."""


class DropinNotImplementedError(ShardkitError, NotImplementedError):
    """A NotImplementedError too."""


class Unavailable(TranslationError, RuntimeError):
    """What FSDP2 cannot do, where FSDP1 or torch raised a RuntimeError."""


class UnavailableHook(TranslationError, AssertionError):
    """A communication hook, which FSDP1 refused with an AssertionError."""


class UnavailableAttribute(TranslationError, AttributeError):
    """An attribute that only FSDP1 has, so that ``hasattr`` and ``getattr`` with a default keep working."""


class ShardedUse(TranslationError, RuntimeError):
    """A computation with parameters that are sharded, where torch raised a RuntimeError."""
