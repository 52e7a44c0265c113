"""``python -m shardkit.fsdp1 train.py ARGS...``: run an FSDP1 program on FSDP2, unchanged."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardkit.fsdp1.dropin.program import run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program that the arguments name, in this process."""
    parser = argparse.ArgumentParser(
        prog="python -m shardkit.fsdp1",
        usage="%(prog)s {FILE | -m MODULE} [ARGUMENT ...]",
        description="Run a program written for torch.distributed.fsdp.FullyShardedDataParallel on "
        "fully_shard: the class in torch.distributed.fsdp is replaced before the program runs.",
        epilog="With several ranks: torchrun --nproc-per-node 8 -m shardkit.fsdp1 train.py",
    )
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_module = words[:1] == ["-m"]
    program = words[1:] if is_module else words
    if not program or program[0].startswith("-"):
        parser.parse_args(program[:1])  # --help
        parser.error("which program? Name a file, or -m and a module")
    run_program(program[0], program[1:], is_module)


if __name__ == "__main__":
    main()
