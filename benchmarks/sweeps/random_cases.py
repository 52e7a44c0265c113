"""Many random models: prints those that neither train like the plain model nor are refused.

``PYTHONPATH=.:tests/helpers python benchmarks/sweeps/random_cases.py --cases 2000``
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from random_models import GOOD, Case, drawn, outcomes

from shardkit.testing import RankFailure, RankPool


def run(pool: RankPool, cases: list[Case]) -> list[str]:
    """What becomes of each on all ranks; one that kills or hangs them is found by
    running it alone.
    """
    try:
        by_rank = pool.run(outcomes, cases)
    except RankFailure as failure:
        if len(cases) == 1:
            return [f"crash: {str(failure).splitlines()[0]}"]
        return [found for case in cases for found in run(pool, [case])]
    return [
        each[0] if len(set(each)) == 1 else f"ranks disagree: {each}"
        for each in zip(*by_rank, strict=True)
    ]


def main() -> None:
    """Run many, and print how often each outcome was seen, with the first case of each bad one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    cases = drawn(arguments.cases, arguments.seed)
    with RankPool(arguments.ranks, timeout=120) as pool:
        for start in range(0, len(cases), 20):
            batch = cases[start : start + 20]
            for case, found in zip(batch, run(pool, batch), strict=True):
                kind = found.partition(":")[0]
                counts[kind] += 1
                if kind not in GOOD:
                    print(found, case, sep="\n  ", flush=True)
            print(
                f"{start + len(batch)} of {len(cases)}: {dict(counts)}", file=sys.stderr, flush=True
            )
    print(dict(counts))


if __name__ == "__main__":
    main()
