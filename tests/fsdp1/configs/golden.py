"""``golden/`` holds what an example of each format comes to, notes and all; run this file to write it anew."""

import contextlib
import io
from pathlib import Path

from shardkit.__main__ import main

HERE = Path(__file__).parent
FILES = sorted((HERE / "files").iterdir())
WORLD = {"transformers_args": 16}


def golden(file: Path) -> Path:
    """Where the output for an example is."""
    return HERE / "golden" / f"{file.name}.txt"


def translated(file: Path) -> str:
    """What ``python -m shardkit translate`` prints for an example, and its exit code."""
    world = WORLD.get(file.stem)
    options = [] if world is None else ["--world", str(world), "--ranks-per-node", "8"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["translate", str(file), *options])
    return f"{out.getvalue()}--- exit code {code}\n"


if __name__ == "__main__":
    for each in FILES:
        golden(each).write_text(translated(each))
