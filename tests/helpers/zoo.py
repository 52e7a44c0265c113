"""The zoo: every model that the default rule is tried on, by name. None is special-cased by the library."""

from __future__ import annotations

from zoo_entry import Entry
from zoo_plain import PLAIN
from zoo_transformers import TRANSFORMERS

ZOO: dict[str, Entry] = {**PLAIN, **TRANSFORMERS}
