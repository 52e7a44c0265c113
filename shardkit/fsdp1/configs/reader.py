"""Reading a configuration so that every key of it is answered for, exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.configs.values import Kind, short
from shardkit.fsdp1.instead import Fate
from shardkit.fsdp1.translate.notes import Note

T = TypeVar("T")
Answers: TypeAlias = Mapping[str, tuple[Fate, str]]


@dataclass
class Ledger:
    """What all readers of one configuration write into."""

    notes: list[Note] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Reader:
    """The keys of one section of a configuration.

    A format asks for the keys it knows with ``get``, answers for each with ``note``, and calls ``finish``, which
    lists the rest as unknown. What is wrong with a value is collected and raised by ``finish`` of the whole.

    Attributes:
        path: where the section is, ``""`` for the whole.
        ledger: the notes and problems so far, of the whole configuration.
    """

    def __init__(self, section: Mapping[Any, Any], path: str = "", prefix: str = "") -> None:
        """
        Args:
            section: the keys and their values.
            path: where the section is, ``""`` for the whole.
            prefix: what its keys may start with and need not, as in ``fsdp_offload_params``.
        """
        self.path = path
        self._values = {str(key): value for key, value in section.items()}
        self._prefix = prefix
        self.ledger = Ledger()
        self._asked: dict[str, None] = {}
        self._answered: set[str] = set()
        self._wrong: set[str] = set()
        self._sections: list[Reader] = []
        self._beside: list[Reader] = []

    def __contains__(self, key: str) -> bool:
        return self._spelling(key) is not None

    def __iter__(self) -> Iterator[str]:
        """The keys as they are written."""
        return iter(self._values)

    def where(self, key: str) -> str:
        """The key's place in the whole configuration, as notes and errors name it."""
        spelling = self._spelling(key) or key
        return f"{self.path}.{spelling}" if self.path else spelling

    def raw(self, key: str) -> Any:
        """What the file says, None where it has no such key."""
        spelling = self._spelling(key)
        return None if spelling is None else self._values[spelling]

    def get(self, key: str, kind: Kind[T], default: T) -> T:
        """The value of a key, or ``default`` where it is absent, null, or not of its kind, which is a problem."""
        value = self.raw(key)
        if value is None:
            return default
        try:
            return kind.parse(value)
        except ValueError:
            self.problem(key, repr(value), kind.rule, kind.fix)
            return default

    def find(self, key: str, kind: Kind[T]) -> T | None:
        """The value of a key, or None where it is absent, null or not of its kind."""
        return None if self.raw(key) is None else self.get(key, kind, None)

    def note(self, key: str, fate: Fate, sentence: str) -> None:
        """Answer for a key; nothing where it is absent or already a problem."""
        spelling = self._spelling(key)
        if spelling is None or spelling in self._wrong:
            return
        assert spelling not in self._answered, f"{self.where(key)} is answered for twice"
        self._answered.add(spelling)
        self.ledger.notes.append(Note(self.where(key), short(self._values[spelling]), fate, sentence))

    def settle(self, answers: Answers) -> None:
        """Answer for the keys whose answer does not depend on their value."""
        for key, (fate, sentence) in answers.items():
            self.note(key, fate, sentence)

    def section(self, key: str, prefix: str = "") -> Reader:
        """The keys below ``key``; an empty reader where there is no such section or nothing in it."""
        value = self.raw(key)
        filled = isinstance(value, Mapping) and len(value) > 0
        inner = Reader(value if filled else {}, self.where(key), prefix)
        inner.ledger = self.ledger
        if filled:
            self._answered.add(self._spelling(key) or key)
            self._sections.append(inner)
        elif value is None or isinstance(value, Mapping):
            self.note(key, "elsewhere", "It is empty.")
        else:
            self.problem(key, repr(value), "It is a section of keys and values", "Indent its keys below it")
        return inner

    def beside(self, values: Mapping[Any, Any], path: str, prefix: str = "") -> Reader:
        """A reader of keys that stand in a file of their own, answered for with these."""
        other = Reader(values, path, prefix)
        other.ledger = self.ledger
        self._beside.append(other)
        return other

    def problem(self, key: str, problem: str, rule: str, fix: str) -> None:
        """Record what ``finish`` will raise; it answers for the key."""
        self._wrong.add(self._spelling(key) or key)
        self.ledger.problems.append(message(self.where(key), problem, rule, fix))

    def trouble(self, error: TranslationError) -> None:
        """Record an error that is not of one value; ``finish`` raises it."""
        self.ledger.problems.append(str(error))

    def finish(self) -> tuple[Note, ...]:
        """A note for every key, in the order of the file.

        Raises:
            TranslationError: everything that is wrong with the values, at once.
        """
        self.list_unknown()
        if self.ledger.problems:
            raise TranslationError("\n".join(dict.fromkeys(self.ledger.problems)))
        places = {path: place for place, path in enumerate(self.paths())}
        return tuple(sorted(self.ledger.notes, key=lambda note: places[note.argument]))

    def paths(self) -> Iterator[str]:
        """The places of all keys, in the order of the file; a section that was entered gives those of its keys."""
        entered = {section.path: section for section in self._sections}
        for key in self._values:
            path = f"{self.path}.{key}" if self.path else key
            if path in entered:
                yield from entered[path].paths()
            else:
                yield path
        for other in self._beside:
            yield from other.paths()

    def list_unknown(self) -> None:
        """A note for each key here and below that nothing answered for."""
        absent = [key for key in self._asked if self._spelling(key) is None]
        for key in self._values:
            if key not in self._answered | self._wrong:
                near = get_close_matches(key.removeprefix(self._prefix), absent, n=1)
                hint = f" Is it {near[0]}?" if near else ""
                path = f"{self.path}.{key}" if self.path else key
                sentence = f"No key that shardkit knows here; nothing was done with it.{hint}"
                self.ledger.notes.append(Note(path, short(self._values[key]), "unknown", sentence))
        for section in (*self._sections, *self._beside):
            section.list_unknown()

    def _spelling(self, key: str) -> str | None:
        """The key as it is written, with the prefix or without; both at once is a problem."""
        self._asked[key] = None
        with_prefix = f"{self._prefix}{key}"
        if key in self._values and self._prefix and with_prefix in self._values:
            self._twice(key, with_prefix)
        return key if key in self._values else with_prefix if with_prefix in self._values else None

    def _twice(self, key: str, with_prefix: str) -> None:
        if with_prefix not in self._wrong:
            self._wrong.add(with_prefix)
            self.ledger.problems.append(
                message(
                    f"{self.path}.{with_prefix}".lstrip("."),
                    f"given as {key} too",
                    "Both are the same key, and which one wins differs between versions",
                    "Leave one of them out",
                )
            )
