"""``python -m shardkit translate``: what it prints, its exit codes, and that what it prints can be
used.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from small_models import Decoder

from shardkit.__main__ import main
from shardkit.fsdp1.configs import read_config
from shardkit.fsdp1.configs.target import Ranks
from shardkit.testing import fake_world

CONFIGS = Path(__file__).parents[1] / "configs" / "files"
FSDP1 = str(CONFIGS / "accelerate_fsdp1.yaml")


def run(*arguments):
    """The exit code of ``translate``."""
    try:
        return main(["translate", *map(str, arguments)])
    except SystemExit as stop:  # argparse's own
        return stop.code


def config_file(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(values))
    return path


def test_without_a_model_there_is_a_note_for_every_key(capsys):
    assert run(FSDP1) == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [note.argument for note in read_config(FSDP1, Ranks()).notes]
    assert lines[0] == "# accelerate"
    assert all(f" {key} " in line for key, line in zip(keys, lines[1:], strict=True))


def test_the_code_of_a_model_broadcasts_and_casts_buffers_as_fsdp1_did(
    tmp_path, capsys, monkeypatch
):
    file = config_file(
        tmp_path,
        distributed_type="FSDP",
        num_processes=2,
        mixed_precision="bf16",
        fsdp_config={"sync_module_states": True},
    )
    monkeypatch.setattr(sys.modules["small_models"], "WithBuffer", WithBuffer, raising=False)
    assert run(file, "--to", "torch", "--model", "small_models:WithBuffer") == 0
    out = capsys.readouterr().out
    model = WithBuffer()
    with fake_world(2):
        exec(compile(out, "translated", "exec"), {"model": model})
        model(torch.zeros(2, 3, dtype=torch.long)).float().sum().backward()
    assert "distributed.broadcast(value, 0)" in out
    assert model.scale.dtype is torch.bfloat16


class WithBuffer(Decoder):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(2))


def test_the_model_may_be_a_configuration_of_transformers(tmp_path, capsys):
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    model = {"model_type": "gpt2", "dtype": "bfloat16", **sizes}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(model))
    file = config_file(tmp_path, fsdp="full_shard auto_wrap", fsdp_config={}, num_train_epochs=1)
    assert run(file, "--to", "plan", "--model", path, "--world", 4) == 0
    out = capsys.readouterr().out
    assert "transformer.h.0 .. transformer.h.1" in out
    assert "bfloat16" not in out  # what trains is loaded in float32
    assert "# mapped    fsdp " in out


def test_ranks_of_the_command_go_before_those_of_the_file(capsys):
    ranks = ("--world", 32, "--ranks-per-node", 4)
    assert run(FSDP1, *ranks, "--model", "small_models:Decoder", "--to", "plan") == 0
    assert "on mesh dp_replicate=8 x dp_shard=4" in capsys.readouterr().out


def test_what_was_refused_prints_the_notes_alone_and_the_exit_code_is_1(tmp_path, capsys):
    assert run(config_file(tmp_path, distributed_type="FSDP", mixed_precision="fp8")) == 1
    out = capsys.readouterr().out
    assert "# refused   mixed_precision" in out
    assert all(line.startswith("#") for line in out.splitlines() if line)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((FSDP1, "--to", "plan"), 2, "--to plan needs --model"),
        ((FSDP1, "--world", "0"), 2, "0 is not a positive number"),
        (
            (FSDP1, "--world", 12, "--ranks-per-node", 5),
            1,
            "ranks_per_node 5 does not divide 12 ranks",
        ),
        (("absent.yaml",), 1, "absent.yaml cannot be read"),
        (
            (FSDP1, "--to", "plan", "--model", "small_models:Absent"),
            1,
            "model small_models:Absent cannot be built",
        ),
    ],
)
def test_the_exit_codes(arguments, code, said, capsys):
    assert run(*arguments) == code
    assert said in capsys.readouterr().err
