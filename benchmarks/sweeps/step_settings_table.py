"""What docs/the-plan.md says of settings that meet in a step: each trains like the plain model.

Three minutes on 4 ranks: ``PYTHONPATH=.:tests/helpers python
benchmarks/sweeps/step_settings_table.py``; ``[--pairs] name ...`` takes "float8" or models of the
zoo.
"""

from __future__ import annotations

import sys
from collections import Counter

from step_settings import CELLS, pairs, seen

from shardkit.testing import RankPool

if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    cells = pairs() if "--pairs" in sys.argv else CELLS
    for name in names or ["NET"]:
        with RankPool(4, timeout=3600) as pool:
            outcomes = pool.run(seen, cells, name)[0]
        print(name, dict(Counter(outcomes.values())), flush=True)
        for cell, outcome in outcomes.items():
            if outcome != "exact":
                print(*cell, outcome)
