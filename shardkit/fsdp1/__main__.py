"""``python -m shardkit.fsdp1 train.py ARGS...``: run an FSDP1 program on FSDP2
without touching it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardkit.errors import ShardkitError
from shardkit.fsdp1.dropin.replace import find, run

USAGE = 2  # as argparse's own


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program that the arguments name, in this process; its own exit code comes as its
    SystemExit.
    """
    parser = argparse.ArgumentParser(
        prog="python -m shardkit.fsdp1",
        usage="%(prog)s {FILE | -m MODULE} [ARGUMENT ...]",
        description="Run a program written for torch.distributed.fsdp.FullyShardedDataParallel on "
        "fully_shard: the class in torch.distributed.fsdp is replaced before the program "
        "runs.",
        epilog="With several ranks: torchrun --nproc-per-node 8 -m shardkit.fsdp1 train.py --lr 1e-4",
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_module = given[:1] == ["-m"]
    name, *argv = given[as_module:] or [""]
    if not name or name.startswith("-"):
        parser.parse_args(given[:1])
        parser.error("which program? Name a file, or -m and a module")
    try:
        program = find(name, as_module)
    except ShardkitError as error:
        print(f"python -m shardkit.fsdp1: {error}", file=sys.stderr)
        return USAGE
    run(name, argv, *program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
