"""Read a configuration: its file, kinds of values, and tables that answer for every key exactly once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.translate.arguments import Note
from shardkit.replacements import Support

_FALSE = ("false", "no", "off", "0")
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(_FALSE, False)
_DTYPES = dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16) | dict.fromkeys(("fp16", "float16"), torch.float16)
_DTYPES |= dict.fromkeys(("fp32", "float32"), torch.float32)


class Kind(NamedTuple):
    """A kind of value: what it is and an example, for errors, and a function that parses it or raises ValueError."""

    what: str
    example: str
    parse: Callable[[Any], Any]


def choice(names: Iterable[str], numbered: bool = False) -> Kind:
    """One of ``names`` in any case; with ``numbered`` also its number from 1, as in accelerate."""
    names = tuple(names)
    by_text = {name.lower(): name for name in names}
    by_text |= {str(number): name for number, name in enumerate(names, 1)} if numbered else {}
    places = f", or their number from 1 to {len(names)}" if numbered else ""
    return Kind(f"one of {', '.join(names)}{places}", names[0], _lookup(by_text))


def _lookup(table: Mapping[str, Any]) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        text = re.sub(r"^[A-Za-z_.]+\.", "", str(value).strip()).lower()  # of an enum or a dtype the last part
        if text not in table:
            raise ValueError
        return table[text]

    return parse


def _integer(value: Any, least: int = 0) -> int:
    number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else -1.0
    if number < least or not number.is_integer():  # YAML reads 1e8 as text
        raise ValueError
    return int(number)


def _names(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError
    return tuple(dict.fromkeys(item.strip() for item in items))


BOOLEAN = Kind("true or false", "true", _lookup(_BOOLEANS))
NUMBER = Kind("a whole number, 0 or more", "100000000", _integer)
RANKS = Kind("a number of ranks, at least 1", "8", lambda value: _integer(value, 1))
DTYPE = Kind("a dtype such as bf16 or float32", "bf16", _lookup(_DTYPES))
NAMES = Kind("a name, names with commas between them, or a list of names", "LlamaDecoderLayer", _names)
GIVEN = Kind("", "", lambda value: bool(value) and str(value).lower() not in _FALSE)

# An answer is "support: sentence", where {} stands for the value.
Table: TypeAlias = Mapping[str, "Key | str"]


class Key(NamedTuple):
    """A key in a table: its kind of value; one answer, one for each value, or a function to one; its default."""

    kind: Kind
    answers: str | Mapping[Any, str] | Callable[[Any], str]
    default: Any = None


def switch(on: str, off: str = "implied: Off.", default: bool = False, kind: Kind = BOOLEAN) -> Key:
    """A key that is true or false."""
    return Key(kind, {True: on, False: off}, default)


def given(on: str, off: str = "implied: None.") -> Key:
    """A key for which only matters whether it is set."""
    return switch(on, off, kind=GIVEN)


class Reader:
    """The keys of one section of a configuration.

    A format reads the keys that it knows, by a table or one by one, and answers for each. Invalid values are collected
    in ``problems``, which ``finish`` raises at once. Keys without an answer are unknown.
    """

    def __init__(
        self, section: Mapping[Any, Any], path: str = "", prefix: str = "", around: Reader | None = None
    ) -> None:
        """Read a section at ``path``, whose keys may start with ``prefix``, as in ``fsdp_offload_params``."""
        self._path, self._prefix = path, prefix
        self._values = {str(key): value for key, value in section.items()}
        self.problems: list[str] = around.problems if around else []  # what finish raises, of all sections
        self._asked: set[str] = set()
        self._answers: dict[str, Note | Reader | None] = {}  # by key as it is written; None is one with a problem
        self._beginnings: dict[str, str] = {}  # of keys that nothing else answers for

    def __contains__(self, key: str) -> bool:
        return self._spelling(key) is not None

    def __iter__(self) -> Iterator[str]:
        """Yield the keys as written."""
        return iter(self._values)

    def raw(self, key: str) -> Any:
        """Return the value as written, None if the key is absent."""
        return self._values.get(self._spelling(key) or "")

    def get(self, key: str, kind: Kind, default: Any = None) -> Any:
        """Return the parsed value of a key, or ``default`` if it is absent, null, or invalid, which is a problem."""
        value = self.raw(key)
        if value is None:
            return default
        try:
            return kind.parse(value)
        except ValueError:
            self.problem(key, f"must be {kind.what}, got {value!r}", f"Use {kind.example}")
            return default

    def take(self, key: str, row: Key) -> Any:
        """Answer for a key as the table says, and return its value."""
        value, answers = self.get(key, row.kind, row.default), row.answers
        if callable(answers):
            self.note(key, answers(value))
        else:
            shown = " and ".join(value) if isinstance(value, tuple) else value
            self.note(key, (answers if isinstance(answers, str) else answers[value]).format(shown))
        return value

    def read(self, table: Table) -> dict[str, Any]:
        """Answer for all keys of a table, and return the values of those that have a kind.

        A row may name several keys; one that ends in ``*`` answers for keys with that prefix that have no other answer.
        """
        rows = [(word, row) for words, row in table.items() for word in words.split()]
        for word, row in rows:
            if isinstance(row, str) and word.endswith("*"):
                self._beginnings[word[:-1]] = row
            elif isinstance(row, str):
                self.note(word, row)
        return {word: self.take(word, row) for word, row in rows if isinstance(row, Key)}

    def note(self, key: str, answer: str) -> None:
        """Answer for a key, unless it is absent or already a problem."""
        spelling = self._spelling(key)
        if spelling is not None and self._answers.get(spelling, ...) is not None:
            assert spelling not in self._answers, f"{self._place(spelling)} is answered for twice"
            self._answers[spelling] = self._noted(spelling, answer)

    def section(self, key: str, prefix: str = "") -> Reader:
        """Return a reader of the keys below ``key``, an empty one if the section is absent or empty."""
        value = self.raw(key)
        filled = isinstance(value, Mapping) and len(value) > 0
        inner = Reader(value if filled else {}, self._place(self._spelling(key) or key), prefix, self)
        if filled:
            self._answers[self._spelling(key) or key] = inner
        elif value is None or isinstance(value, Mapping):
            self.note(key, "elsewhere: It is empty.")
        else:
            self.problem(key, f"must be a section of keys and values, got {value!r}", "Indent its keys below it")
        return inner

    def problem(self, key: str, problem: str, fix: str) -> None:
        """Record an error for ``finish`` to raise, which answers for the key."""
        self._answers[self._spelling(key) or key] = None
        self.problems.append(message(self._place(self._spelling(key) or key), problem, "", fix))

    def finish(self) -> tuple[Note, ...]:
        """Return a note for every key, in the order of the file, or raise all problems at once."""
        if self.problems:
            raise TranslationError("\n".join(dict.fromkeys(self.problems)))
        return tuple(self.notes())

    def notes(self) -> Iterator[Note]:
        """Yield a note for each key here and below, in the order of the file."""
        absent = [key for key in self._asked if self._spelling(key) is None]
        for key in self._values:
            answer = self._answers.get(key, ...)
            if isinstance(answer, Reader):
                yield from answer.notes()
            elif isinstance(answer, Note):
                yield answer
            elif answer is ...:
                near = get_close_matches(key.removeprefix(self._prefix), absent, n=1, cutoff=0.8)
                hint = f" Did you mean {near[0]}?" if near else ""
                unknown = f"unknown: shardkit does not know this key and ignores it.{hint}"
                begun = (answer for beginning, answer in self._beginnings.items() if key.startswith(beginning))
                yield self._noted(key, unknown if near else next(begun, unknown))

    def _noted(self, spelling: str, answer: str) -> Note:
        support, _, sentence = answer.partition(": ")
        value = self._values[spelling]
        text = value if isinstance(value, str) else repr(value)
        text = text if len(text) <= 60 else f"{text[:57]}..."
        return Note(self._place(spelling), text, cast(Support, support), sentence)

    def _place(self, spelling: str) -> str:
        return f"{self._path}.{spelling}" if self._path else spelling

    def _spelling(self, key: str) -> str | None:
        """Return the key as written, with the prefix or without; None if it is absent."""
        self._asked.add(key)
        with_prefix = f"{self._prefix}{key}"
        return key if key in self._values else with_prefix if with_prefix in self._values else None


def load(path: str | os.PathLike[str]) -> Mapping[Any, Any]:
    """Return the keys and values of a JSON file, or of a YAML file by any other name."""
    file = Path(path)
    parse: Callable[[str], Any] = json.loads
    invalid: type[Exception] = ValueError
    if file.suffix != ".json":
        import yaml

        parse, invalid = yaml.safe_load, yaml.YAMLError
    try:
        found = parse(file.read_text())
    except (OSError, UnicodeDecodeError, invalid) as error:
        raise TranslationError(message(str(file), f"cannot be read: {error}", "", "Give a valid file")) from None
    if not isinstance(found, Mapping):
        problem = f"must be a mapping of keys to values, got {'nothing' if found is None else type(found).__name__}"
        raise TranslationError(message(str(file), problem, "", "Give the file that the training script reads"))
    return found
