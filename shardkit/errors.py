"""The exceptions of shardkit, and the form of their messages."""

from __future__ import annotations

from collections.abc import Iterable


class ShardkitError(Exception):
    """Base of every error that shardkit raises on purpose."""


class PlanError(ShardkitError, ValueError):
    """A model, a rule, a mesh or a plan that cannot be sharded as asked. Nothing was changed,
    unless the message says that torch failed with the model sharded in part.
    """


class TranslationError(ShardkitError, ValueError):
    """FSDP1 arguments, or a configuration, that FSDP2 cannot do as written. Nothing was changed."""


class CheckpointError(ShardkitError):
    """A checkpoint, or model state, that cannot be saved or loaded as asked.
    Nothing was changed.
    """


def message(subject: str, problem: str, rule: str, fix: str) -> str:
    """Return an error message in sentences, ``<subject> <problem>. <rule>. <fix>.``.

    The subject is an FQN or an argument's name; the problem has the value
    (``"must be a MeshSpec, got dict"``); the rule may be empty where the problem says it.
    """
    parts = (part.rstrip(". ") for part in (f"{subject} {problem}", rule, fix) if part)
    return ". ".join(parts) + "."


def refuse(problems: Iterable[str]) -> None:
    """Raise one PlanError that lists all ``problems``, if there are any."""
    if text := "\n".join(problems):
        raise PlanError(text)


def listing(names: Iterable[str], most: int = 20) -> str:
    """Join names with commas; after ``most`` names, give the number of the rest."""
    all_names = list(names)
    shown = ", ".join(all_names[:most])
    return shown if len(all_names) <= most else f"{shown} and {len(all_names) - most} more"
