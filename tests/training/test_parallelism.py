"""The programs of docs/parallelism.md train as one process does, and their checkpoints load into any
layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import assert_equal, values_of
from torch import Tensor, nn

from shardkit.checkpoint import load_checkpoint
from shardkit.testing import distributed

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
PROGRAM = re.compile(r"```python\n(# torchrun --nproc-per-node 4 (\w+)\.py\n.*?)```", re.DOTALL)
PROGRAMS = {name: code for code, name in PROGRAM.findall(PAGE.read_text())}
READERS = {"pipeline": 2, "context": 2, "experts": 4}  # ranks with batches of their own


def in_float64(run: Callable[..., Any], *args: Any) -> Any:
    """In float64 a wrong divisor cannot hide in rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return run(*args)
    finally:
        torch.set_default_dtype(before)


def run_program(name: str, folder: Path) -> dict[str, Any]:
    """Run a program on this rank, with its checkpoints in a folder; return its names."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    code = PROGRAMS[name].replace('"runs/', f'"{folder}/')
    in_float64(exec, compile(code, f"{name}.py", "exec"), scope)
    return scope


def train_in_one_process(
    scope: dict[str, Any], readers: int
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """Train the program's whole model on the batches of all its ranks."""
    torch.manual_seed(0)
    model = scope["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        loss, tokens = torch.zeros(()), torch.zeros(())
        for reader in range(readers):
            ids, labels = scope["batch"](step, reader)
            loss = loss + scope["summed_loss"](model(ids), labels)
            tokens = tokens + (labels != -100).sum()
        (loss / tokens).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, norms


def assert_trained_alike(scope: dict[str, Any], whole: dict[str, Tensor]) -> None:
    """Compare parameters and optimizer state; a stage has some of them."""
    values = values_of(scope["model"], scope["optimizer"])
    assert values
    for name, value in values.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-12)


def test_every_program_of_the_page_is_run_here() -> None:
    assert PROGRAMS.keys() == READERS.keys()


@pytest.mark.parametrize("name", READERS)
@distributed(world_size=4, backend="gloo")
def test_a_program_trains_as_one_process_does(name, tmp_path):
    scope = run_program(name, tmp_path)
    model, optimizer, norms = in_float64(train_in_one_process, scope, READERS[name])
    assert min(norms) > 0.5, "nothing to clip"
    assert [float(norm) for norm in scope["norms"]] == pytest.approx(norms, rel=1e-12)
    assert_trained_alike(scope, values_of(model, optimizer))
    if (tmp_path / name).exists():  # what it saved loads into the whole model
        load_checkpoint(tmp_path / name, model, optimizer)
        whole = values_of(model, optimizer)
        assert_equal(values_of(scope["model"], scope["optimizer"]), whole, some=True)
