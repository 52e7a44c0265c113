"""``python tests/helpers/sweep_disagreements.py --after 1``: every kind of disagreement, on meshes of 4 ranks."""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import forks
from disagreements import KINDS, WORLD, is_named, run

if __name__ == "__main__":
    forks.serve()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--after", type=float, default=1.0)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--mesh", dest="meshes", type=int, nargs="*", action="append")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    failures = 0
    for mesh in map(tuple, options.meshes or [[WORLD], [2, WORLD // 2]]):
        for kind in options.kinds:
            with tempfile.TemporaryDirectory() as folder:
                outcome = run(kind, Path(folder), options.after, mesh=mesh)
            good = is_named(kind, outcome.report) and outcome.seconds <= options.after + 2
            failures += not good
            print(f"{'ok ' if good else 'BAD'} {mesh} {kind}: {outcome.seconds:.1f} s", flush=True)
            if options.verbose or not good:
                print(outcome.report or "\n".join(outcome.output)[-3000:], flush=True)
    sys.exit(failures)
