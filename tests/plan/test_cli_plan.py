"""``python -m shardkit plan``: the answer first."""

import json
import re
import sys

import pytest

from shardkit.__main__ import main, script

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_what_fits_and_what_it_costs(config, capsys):
    options = ["--world", "16", "--budget", "1000KiB", "--batch", "2x64"]
    assert main(["plan", config, *options]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"peak 8\d\d\.\d KiB, \d+\.\d KiB free\n", shown)
    assert shown.startswith("parameters in float32 (--dtype)")
    assert "\n\nfits in 900.0 KiB: " in shown
    assert "blocks checkpointed" in shown
    assert "ShardingPlan: " in shown
    assert "kept unsharded (ZeRO-2)" in shown


def test_the_plan_of_a_factory_without_a_batch(capsys):
    assert main(["plan", "small_models:Decoder", "--world", "4", "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("parameters in bfloat16 (--dtype)")
    assert "\n\nShardingPlan: " in shown
    assert "pass --batch" in shown


def test_the_console_script_finds_a_factory_in_the_working_directory(tmp_path, capsys, monkeypatch):
    (tmp_path / "of_this_project.py").write_text("from small_models import Decoder\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["shardkit", "plan", "of_this_project:Decoder"])
    assert script() == 0
    assert "\nShardingPlan: " in capsys.readouterr().out


def test_every_strategy_without_a_budget(capsys):
    assert main(["plan", "small_models:Decoder", "--world", "4", "--batch", "2x5"]) == 0
    shown = capsys.readouterr().out
    assert "kept unsharded (ZeRO-2)" in shown
    assert "pass --budget" in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["small_models:Decoder", "--budget", "1GiB"], "--budget needs --batch."),
        (
            ["small_models:Decoder", "--budget", "1 KiB", "--batch", "2x5"],
            "budget of 921 B without the reserve is too little: ",
        ),
        (["small_models:Absent"], "small_models:Absent cannot be built"),
    ],
)
def test_what_cannot_be_said(arguments, text, capsys):
    assert main(["plan", *arguments]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--batch", "2"], ["--world", "0"], ["--param-dtype", "nn"]])
def test_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "small_models:Decoder", *arguments])
    assert caught.value.code == 2
