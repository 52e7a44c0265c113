"""Read a configuration by tables: every key of a section gets one value and one note."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.translate.notes import Note


class Kind(NamedTuple):
    """A kind of value: what it is and an example, for errors; ``parse`` raises ValueError."""

    what: str
    example: str
    parse: Callable[[Any], Any]


def choice(names: Iterable[str], numbered: bool = False) -> Kind:
    """One of ``names`` in any case; with ``numbered`` also its number from 1, as in accelerate."""
    names = tuple(names)
    by_text = {name.lower(): name for name in names}
    if numbered:
        for number, name in enumerate(names, 1):
            by_text[str(number)] = name
    return Kind(f"one of {', '.join(names)}", names[0], _lookup(by_text))


def _lookup(table: Mapping[str, Any]) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        text = re.sub(r"^[A-Za-z_.]+\.", "", str(value).strip()).lower()  # the last part of an enum
        if text not in table:
            raise ValueError
        return table[text]

    return parse


def _ranks(value: Any) -> int:
    number = int(str(value))
    if number < 1:
        raise ValueError
    return number


def _names(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError
    return tuple(item.strip() for item in items)


def _is_set(value: Any) -> bool:
    return str(value).lower() not in ("", "0", "false", "no", "[]", "{}")


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}

BOOLEAN = Kind("true or false", "true", _lookup(_BOOLEANS))
RANKS = Kind("a number of ranks, at least 1", "8", _ranks)
NAMES = Kind("a name, or a list of names", "LlamaDecoderLayer", _names)
ANYTHING = Kind("", "", _is_set)


class Key(NamedTuple):
    """A key in a table: its kind of value; an answer, or one for each value; its default.

    An answer is ``"support: sentence"``, where ``{}`` stands for the value.
    """

    kind: Kind
    answer: str | Mapping[Any, str]
    default: Any = None


# A row for one key, or for several in one string: a Key whose value is used; or only an answer,
# whatever the value; or SECTION, for keys and values that are read by a table of their own.
# The row "*" answers for keys without a row, but for those that begin with fsdp.
Table: TypeAlias = Mapping[str, "Key | str"]
SECTION = "elsewhere: Empty, or not read beside the others."
_UNKNOWN = "unknown: shardkit does not know this key and ignores it."


def switch(on: str, off: str = "implied: Off.", default: bool | None = False) -> Key:
    """A key that is true or false."""
    return Key(BOOLEAN, {True: on, False: off}, default)


def if_set(answer: str) -> Key:
    """A key of any kind, of which only matters whether it is set."""
    return Key(ANYTHING, {True: answer, False: "implied: None."}, False)


class Config:
    """A configuration, the notes on its keys, and the problems with their values."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.values = values
        self.notes: list[Note] = []
        self.problems: list[str] = []

    def section(self, name: str) -> Mapping[Any, Any]:
        """Return a section; the whole configuration for ``""``; empty if there is none."""
        values = (self.values.get(name) or {}) if name else self.values
        if not isinstance(values, Mapping):
            problem = f"must be a section of keys and values, got {values!r}"
            self.problem(name, problem, "Indent its keys below it")
            return {}
        return values

    def read(self, table: Table, section: str = "", prefix: str = "") -> dict[str, Any]:
        """Take note of each key of a section; return the values of the table's Keys, by name.

        Keys may be written with ``prefix``, as in ``fsdp_offload_params``.
        """
        rows: dict[str, Key | str] = {}
        values: dict[str, Any] = {}
        for names, row in table.items():
            for name in names.split():
                rows[name] = row
                if isinstance(row, Key):
                    values[name] = row.default
        written_values = self.section(section)
        if written_values:  # whose keys get notes, instead of the section
            self.notes = [note for note in self.notes if note.argument != section]
        for written, value in written_values.items():
            place = f"{section}.{written}" if section else str(written)
            key = str(written).removeprefix(prefix)
            if key not in rows:
                key = str(written)
            row = rows.get(key) or _without_row(rows, key, prefix)
            if isinstance(row, Key):
                values[key] = self._value(place, value, row)
            else:
                self.notes.append(Note.of(place, value, row))
        return values

    def _value(self, place: str, value: Any, row: Key) -> Any:
        """Return the value of a key, and take note of it."""
        try:
            parsed = row.default if value is None else row.kind.parse(value)
        except ValueError:
            self.problem(
                place, f"must be {row.kind.what}, got {value!r}", f"Use {row.kind.example}"
            )
            return row.default
        answer = row.answer
        if not isinstance(answer, str):
            answer = answer.get(parsed, "implied: None.")
        shown = " and ".join(parsed) if isinstance(parsed, tuple) else parsed
        self.notes.append(Note.of(place, value, answer.format(shown)))
        return parsed

    def answer(self, place: str, answer: str) -> None:
        """Replace the note on a key, if there is one: other keys decide about it."""
        for index, note in enumerate(self.notes):
            if note.argument == place:
                self.notes[index] = Note.of(place, note.value, answer)

    def problem(self, place: str, problem: str, fix: str) -> None:
        """Record an error, which ``finish`` raises together with all others."""
        self.problems.append(message(place, problem, "", fix))

    def finish(self) -> tuple[Note, ...]:
        """Return the notes, or raise all problems at once."""
        if self.problems:
            raise TranslationError("\n".join(dict.fromkeys(self.problems)))
        return tuple(self.notes)


def _without_row(rows: Mapping[str, Key | str], key: str, prefix: str) -> str:
    """Return the answer for a key without a row."""
    near = get_close_matches(key.removeprefix(prefix), rows, n=1, cutoff=0.85)
    if near:
        return f"{_UNKNOWN} Did you mean {near[0]}?"
    rest = rows.get("*")
    return rest if isinstance(rest, str) and not key.startswith("fsdp") else _UNKNOWN


def load(path: str | os.PathLike[str]) -> Mapping[Any, Any]:
    """Return the keys and values of a JSON file, or of a YAML file by any other name."""
    file = Path(path)
    parse: Callable[[str], Any] = json.loads
    invalid: type[Exception] = ValueError
    if file.suffix != ".json":
        import yaml

        parse, invalid = yaml.safe_load, yaml.YAMLError
    try:
        values = parse(file.read_text())
    except (OSError, UnicodeDecodeError, invalid) as error:
        raise TranslationError(f"{file} cannot be read as JSON or YAML: {error}.") from None
    if not isinstance(values, Mapping):
        raise TranslationError(
            f"{file} must be a mapping of keys to values, got {type(values).__name__}. Give the "
            "file that the training script reads."
        )
    return values
