"""Errors that are also of the class that FSDP1 raised, because programs catch that one."""

from __future__ import annotations

from shardkit.errors import ShardkitError, TranslationError


class DropinRuntimeError(ShardkitError, RuntimeError):
    """A RuntimeError too."""


class DropinAssertionError(ShardkitError, AssertionError):
    """An AssertionError too."""


class DropinNotImplementedError(ShardkitError, NotImplementedError):
    """A NotImplementedError too."""


class Unavailable(TranslationError, RuntimeError):
    """What FSDP2 cannot do, where FSDP1 or torch raised a RuntimeError."""


class UnavailableAttribute(TranslationError, AttributeError):
    """An attribute that only FSDP1 has, so that ``hasattr`` and ``getattr`` with a default keep working."""
