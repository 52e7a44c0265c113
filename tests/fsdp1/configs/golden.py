"""``golden/`` holds what each example comes to, notes and all; ``python tests/fsdp1/configs/golden.py`` writes it."""

import contextlib
import io
from pathlib import Path

from shardkit.__main__ import main
from shardkit.fsdp1.configs import read_config
from shardkit.fsdp1.configs.target import Ranks
from shardkit.fsdp1.configs.write import script

HERE = Path(__file__).parent
FILES = sorted((HERE / "files").iterdir())
REFUSED = sorted((HERE / "refused").iterdir())
WORLD = {"axolotl_fsdp1": 16, "axolotl_fsdp2": 16, "deepspeed": 16, "deepspeed_zero3": 16, "transformers": 16}
WORLD |= {"transformers_args": 16, "roll": 16}


def golden(file: Path) -> Path:
    """Where the output for an example is."""
    return HERE / "golden" / f"{file.parent.name}_{file.name}.txt"


def translated(file: Path) -> str:
    """What ``python -m shardkit translate`` prints for an example, its exit code, and the code for any model."""
    world = WORLD.get(file.stem)
    options = [] if world is None else ["--world", str(world), "--ranks-per-node", "8"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["translate", str(file), *options])
    target = read_config(file, Ranks(world, None if world is None else 8)).target
    return f"{out.getvalue()}\n--- exit code {code}, --to torch\n\n{script(target)}"


if __name__ == "__main__":
    for each in (*FILES, *REFUSED):
        golden(each).write_text(translated(each))
