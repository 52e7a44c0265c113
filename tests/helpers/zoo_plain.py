"""All plain-torch models of the zoo."""

from __future__ import annotations

from zoo_entry import Entry
from zoo_odd import ODD
from zoo_usual import USUAL

PLAIN: dict[str, Entry] = {**USUAL, **ODD}
