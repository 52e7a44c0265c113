"""Read a configuration file by tables: every key of a section gets one value and one note."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

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
        by_text |= {str(number): name for number, name in enumerate(names, 1)}
    return Kind(f"one of {', '.join(names)}", names[0], _lookup(by_text))


def _lookup(table: Mapping[str, Any]) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        text = re.sub(r"^[A-Za-z_.]+\.", "", str(value).strip()).lower()  # the last part of an enum
        if text not in table:
            raise ValueError
        return table[text]

    return parse


def _number(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    try:
        number = float(value)  # YAML reads 1e8 as text
    except TypeError:
        raise ValueError from None
    if number < 0 or not number.is_integer():
        raise ValueError
    return int(number)


def _ranks(value: Any) -> int:
    if not _number(value):
        raise ValueError
    return _number(value)


def _names(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError
    return tuple(item.strip() for item in items)


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}
_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
_DTYPES |= {"float16": torch.float16, "fp32": torch.float32, "float32": torch.float32}

BOOLEAN = Kind("true or false", "true", _lookup(_BOOLEANS))
NUMBER = Kind("a whole number, 0 or more", "100000000", _number)
RANKS = Kind("a number of ranks, at least 1", "8", _ranks)
DTYPE = Kind("a dtype such as bf16 or float32", "bf16", _lookup(_DTYPES))
NAMES = Kind("a name, or a list of names", "LlamaDecoderLayer", _names)
GIVEN = Kind("", "", lambda value: str(value).lower() not in ("", "false", "no", "[]", "{}"))


class Key(NamedTuple):
    """A key in a table: its kind of value; an answer, or one for each value; its default.

    An answer is ``"support: sentence"``, where ``{}`` stands for the value.
    """

    kind: Kind
    answer: str | Mapping[Any, str]
    default: Any = None


# By one key or several: a Key, an answer whatever the value, or SECTION, which is read by itself.
# A key that ends in * answers for all that begin so and have no row of their own.
Table: TypeAlias = Mapping[str, "Key | str"]
SECTION = "elsewhere: Empty, or not read beside the others."


def switch(
    on: str, off: str = "implied: Off.", default: bool | None = False, kind: Kind = BOOLEAN
) -> Key:
    """A key that is true or false."""
    return Key(kind, {True: on, False: off}, default)


def given(on: str) -> Key:
    """A key for which only matters whether it is set."""
    return switch(on, "implied: None.", kind=GIVEN)


class Config:
    """A configuration, the notes on its keys, and the problems with their values."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.values = values
        self.notes: list[Note] = []
        self.problems: list[str] = []

    def section(self, path: str = "") -> Mapping[Any, Any]:
        """Return the section at a dotted path, empty if there is none."""
        found = self.values
        for key in path.split(".") if path else ():
            inner = found.get(key) or {}
            if not isinstance(inner, Mapping):
                problem = f"must be a section of keys and values, got {inner!r}"
                self.problem(path, problem, "Indent its keys below it")
                return {}
            found = inner
        return found

    def read(self, table: Table, path: str = "", prefix: str = "") -> dict[str, Any]:
        """Answer for each key of a section; return the values of the table's Keys, by name.

        Keys may be written with ``prefix``, as in ``fsdp_offload_params``.
        """
        rows = {word: row for words, row in table.items() for word in words.split()}
        found = {word: row.default for word, row in rows.items() if isinstance(row, Key)}
        section = self.section(path)
        if section:  # whose keys answer instead
            self.notes = [note for note in self.notes if note.argument != path]
        for written, value in section.items():
            place = f"{path}.{written}" if path else str(written)
            key = str(written).removeprefix(prefix)
            key = key if key in rows else str(written)
            row = rows.get(key) or _answer_to_beginning(rows, key, prefix)
            if isinstance(row, Key):
                self._parse(found, key, place, value, row)
            else:
                self.notes.append(Note.of(place, value, row))
        return found

    def _parse(self, found: dict[str, Any], key: str, place: str, value: Any, row: Key) -> None:
        try:
            parsed = row.default if value is None else row.kind.parse(value)
        except ValueError:
            fix = f"Use {row.kind.example}"
            self.problem(place, f"must be {row.kind.what}, got {value!r}", fix)
            return
        found[key] = parsed
        answer = row.answer
        if not isinstance(answer, str):
            answer = answer.get(parsed, "implied: None.")
        shown = " and ".join(parsed) if isinstance(parsed, tuple) else parsed
        self.notes.append(Note.of(place, value, answer.format(shown)))

    def answer(self, place: str, answer: str) -> None:
        """Answer for a key, as other keys decide, instead of what the table says."""
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


def _answer_to_beginning(rows: Mapping[str, Key | str], key: str, prefix: str) -> str:
    """Return the answer for a key without a row: of those that begin so, or that it is unknown."""
    unknown = "unknown: shardkit does not know this key and ignores it."
    near = get_close_matches(key.removeprefix(prefix), rows, n=1, cutoff=0.85)
    if near:
        return f"{unknown} Did you mean {near[0]}?"
    for word, row in rows.items():
        if word.endswith("*") and key.startswith(word[:-1]) and isinstance(row, str):
            return row
    return unknown


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
        problem = f"cannot be read: {error}"
        raise TranslationError(message(str(file), problem, "", "Give a valid file")) from None
    if not isinstance(found, Mapping):
        kind = "nothing" if found is None else type(found).__name__
        problem = f"must be a mapping of keys to values, got {kind}"
        fix = "Give the file that the training script reads"
        raise TranslationError(message(str(file), problem, "", fix))
    return found
