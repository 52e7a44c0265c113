"""The zoo: every model that the default rule is tried on, by name. None is special-cased by the
library.
"""

from zoo_entry import Entry
from zoo_odd import ODD
from zoo_transformers import TRANSFORMERS
from zoo_usual import USUAL

PLAIN: dict[str, Entry] = {**USUAL, **ODD}
ZOO: dict[str, Entry] = {**PLAIN, **TRANSFORMERS}
