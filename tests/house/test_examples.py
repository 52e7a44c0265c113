"""Every program of docs/examples runs, and does what its first lines say."""

import json
import os
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run_example(name, results, *args):
    """Run the program's ``main`` on this rank; rank 0 writes down the losses that it returns."""
    losses = runpy.run_path(str(EXAMPLES / name))["main"](list(args))
    if dist.get_rank() == 0:
        results.write_text(json.dumps(losses))


on_2 = on_ranks(2)(run_example)
on_4 = on_ranks(4)(run_example)


def losses(run, name, folder, *args):
    run(name, folder / "losses", *map(str, args))
    return json.loads((folder / "losses").read_text())


def test_every_example_is_run_here_and_listed():
    here, listed = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    programs = [path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")]
    assert programs
    for name in programs:
        assert f'"{name}"' in here
        assert f"]({name})" in listed


SMALL = ["--dim", 32, "--layers", 2, "--context", 32, "--batch", 8]


def test_pretraining_learns_and_resumes_on_other_ranks(tmp_path):
    whole = losses(
        on_2,
        "pretrain.py",
        tmp_path,
        *SMALL,
        "--save-every",
        3,
        "--steps",
        8,
        "--runs",
        tmp_path / "whole",
    )
    assert len(whole) == 8
    assert whole[-1] < whole[0] - 0.3
    (tmp_path / "whole" / "step-8").rename(tmp_path / "later")
    resumed = losses(
        on_4, "pretrain.py", tmp_path, *SMALL, "--steps", 8, "--runs", tmp_path / "whole"
    )
    # other ranks add the same numbers in another order
    assert resumed == pytest.approx(whole[6:], rel=1e-5)


PROJECT = [
    "model.dim=32",
    "model.layers=2",
    "model.context=32",
    "train.batch=8",
    "train.micro_batch=2",
    "generate=2",
]


def project(run, folder, *changes):
    folder.mkdir(exist_ok=True)
    config = EXAMPLES / "project" / "config.yaml"
    return losses(
        run, "project/train.py", folder, config, *PROJECT, f"out={folder / 'runs'}", *changes
    )


def run_on_two_nodes(*args):
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # torchrun's
    try:
        run_example(*args)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


on_2_by_2 = on_ranks(4)(run_on_two_nodes)


def test_the_project_trains_alike_with_every_strategy(tmp_path):
    found = {}
    for strategy in ("zero3", "zero2", "hsdp", "hpz", "ddp"):
        changes = ["train.steps=2", f"sharding.strategy={strategy}", "sharding.recompute=true"]
        found[strategy] = project(on_2_by_2, tmp_path / strategy, *changes)
        # ranks sum in another order
        assert found[strategy] == pytest.approx(found["zero3"], rel=1e-5)
    assert found["zero3"][-1] < found["zero3"][0] - 0.1


def test_the_project_learns_resumes_and_its_trace_names_the_units(tmp_path, capsys):
    whole = project(on_2, tmp_path, "train.steps=6", "train.evaluate_every=3", "profile=2")
    assert whole[-1] < whole[0] - 0.3
    (tmp_path / "runs" / "step-6").rename(tmp_path / "later")
    resumed = project(on_4, tmp_path, "train.steps=6", "train.micro_batch=1")
    assert resumed == pytest.approx(whole[3:], rel=1e-5)
    units = runpy.run_path(str(EXAMPLES / "project/units.py"))
    capsys.readouterr()
    units["main"]([str(tmp_path / "runs" / "trace-rank0.json"), str(tmp_path / "step.png")])
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(rows[1:]) == ["(root)", "layers.0", "layers.1", "norm, head", "tokens"]
    assert (tmp_path / "step.png").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_engines_receive_the_merged_weights(tmp_path):
    losses(on_4, "weight_sync.py", tmp_path)  # which compares them


def test_experts_train_alike_whatever_the_expert_parallelism(tmp_path):
    whole, split = (losses(on_4, "experts.py", tmp_path, "--steps", 4, "--ep", ep) for ep in (1, 4))
    assert whole[-1] < whole[0] - 1
    assert split == pytest.approx(whole, rel=1e-4)  # experts add their tokens in another order


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """A tiny Llama with a tokenizer of characters, as the hub would have it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("hub")
    words = {word: number for number, word in enumerate(["<pad>", *"abcdefghijklmnopqrstuvwxyz "])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def test_finetuning_learns_and_saves_for_transformers(snapshot, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "lines").write_text(
        "\n".join(["the cat sat", "on the mat", "a rat", "and that is that"] * 4)
    )
    args = [
        "--model",
        snapshot,
        "--data",
        tmp_path / "lines",
        "--epochs",
        4,
        "--lr",
        1e-2,
        "--recompute",
    ]
    found = losses(on_2, "finetune.py", tmp_path, *args, "--out", tmp_path / "tuned")
    assert len(found) == 8
    assert found[-1] < found[0] - 0.3
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    ids = AutoTokenizer.from_pretrained(tmp_path / "tuned")("the cat sat", return_tensors="pt")[
        "input_ids"
    ]
    assert tuned(ids, labels=ids).loss < found[0] - 0.3


# peft 0.21 asks for it
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_learn_and_load_into_an_ordinary_model(snapshot, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found = losses(
        on_2, "lora.py", tmp_path, "--model", snapshot, "--out", tmp_path / "adapters", "--steps", 6
    )
    assert found[-1] < found[0]
    assert not list((tmp_path / "adapters").glob("model*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(snapshot)
    model = PeftModel.from_pretrained(base, tmp_path / "adapters")
    lora_b = [param for name, param in model.named_parameters() if "lora_B" in name]
    assert len(lora_b) == 14
    assert all(param.any() for param in lora_b)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_on_nf4_learn_and_resume_as_if_never_stopped(snapshot, tmp_path):
    pytest.importorskip("torchao")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def run(out, steps):
        args = [
            "--model",
            snapshot,
            "--out",
            tmp_path / out,
            "--block",
            32,
            "--scaler-block",
            8,
            "--steps",
            steps,
        ]
        return losses(on_2, "qlora.py", tmp_path, *args)

    whole = run("whole", 4)
    assert whole == run("parts", 2) + run("parts", 4)
    files = {
        out: (tmp_path / out / "adapter_model.safetensors").read_bytes()
        for out in ("whole", "parts")
    }
    assert files["whole"] == files["parts"]
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(snapshot), tmp_path / "parts"
    )
    assert all(param.any() for name, param in model.named_parameters() if "lora_B" in name)
    assert len(list((tmp_path / "parts" / "runs").iterdir())) == 2


def test_a_plan_for_a_cluster_needs_none(capsys):
    main = runpy.run_path(str(EXAMPLES / "plan_cluster.py"))["main"]
    config = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
    }
    config["num_hidden_layers"] = 6
    main(["--ranks", "16", "--gpu-memory", "64MiB", "--context", "128"], config)
    printed = capsys.readouterr().out
    assert "on mesh dp_shard=16" in printed
    assert "dp_replicate" in printed
    assert "fsdp.fully_shard(" in printed
    assert not dist.is_initialized()


def test_a_program_for_fsdp1_runs(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "from_fsdp1.py"))
    path = tmp_path / "model.pt"
    fsdp1_on_2(str(path), tmp_path / "losses")
    found = json.loads((tmp_path / "losses").read_text())
    assert found[-1] < found[0]
    plain = example["build"]()
    plain.load_state_dict(torch.load(path, weights_only=True))


def run_fsdp1(path, results):
    found = runpy.run_path(str(EXAMPLES / "from_fsdp1.py"))["main"](path)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))


fsdp1_on_2 = on_ranks(2)(run_fsdp1)
