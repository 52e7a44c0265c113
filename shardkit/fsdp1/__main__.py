"""``python -m shardkit.fsdp1 train.py ARGS...``: run an FSDP1 program on FSDP2 without touching it."""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
from collections.abc import Sequence
from types import TracebackType

from shardkit.errors import ShardkitError
from shardkit.fsdp1.dropin.redirect import Program, redirect_for_good

USAGE = 2  # as argparse's own


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program that the arguments name, in this process; its own exit code comes as its SystemExit."""
    parser = argparse.ArgumentParser(
        prog="python -m shardkit.fsdp1",
        usage="%(prog)s [--also PACKAGE] {FILE | -m MODULE} [ARGUMENT ...]",
        description="Run a program written for torch.distributed.fsdp.FullyShardedDataParallel on fully_shard. What "
        "its own files import from torch.distributed.fsdp comes from shardkit.fsdp1; installed packages keep torch's.",
        epilog="With several ranks: torchrun --nproc-per-node 8 -m shardkit.fsdp1 train.py --lr 1e-4",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="redirect this installed package too; may be repeated",
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = 0  # arguments before the program's name, or its -m
    while own < len(given) and given[own].startswith("-") and given[own] != "-m":
        own += 1 + (given[own] == "--also")
    options = parser.parse_args(given[:own])
    as_module = given[own : own + 1] == ["-m"]
    name, *argv = given[own + as_module :] or [""]
    if not name:
        parser.error("which program? Name a file, or -m and a module")
    redirect = redirect_for_good(options.also)
    sys.excepthook = functools.partial(_from_the_program_on, sys.excepthook)
    try:
        program = Program(name, redirect, as_module)
    except ShardkitError as error:
        print(f"python -m shardkit.fsdp1: {error}", file=sys.stderr)
        return USAGE
    if program.folder is not None and not getattr(sys.flags, "safe_path", False):  # which Python 3.10 has not
        sys.path[0] = program.folder
    program.run(argv)
    if not redirect.count and os.environ.get("RANK", "0") == "0":  # a library may wrap with FSDP for it
        said = "no file of the program imports torch.distributed.fsdp, so nothing was redirected"
        print(f"python -m shardkit.fsdp1: {said}. Name the package that does with --also.", file=sys.stderr)
    return 0


def _from_the_program_on(
    show: object, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an error as plain Python does, without the lines that led into the program."""
    # runpy is frozen since Python 3.11.
    ours = ("<frozen runpy>", runpy.__file__, __file__, Program.run.__code__.co_filename)
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    assert callable(show)
    show(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    sys.exit(main())
