"""Whole FSDP1 programs, as people write them, give the losses of torch's FSDP1 on the drop-in.

The programs are in ``programs/``, most after public ones and each with habits of its own. None is
changed but for the name of the package that it imports, or not at all, where its imports are
redirected. Sums over two ranks have one order, so losses are equal bit by bit, with two exceptions,
which are bounded below.
"""

from __future__ import annotations

import itertools
import math
import shlex

import pytest
import torch
import torch.distributed as dist
from program_runs import PROGRAMS, losses, torchs_losses

from shardkit._torch import torch_version
from shardkit.testing import distributed

# Variants of each program, by its arguments.
VARIANTS = {
    "nano_gpt": [
        "--sample",
        "--dtype bfloat16 --strategy SHARD_GRAD_OP",
        "--dtype bfloat16 --flat --always-sync",
    ],
    "dit_ema": [
        "--grad-clip 1e9",
        "--precision bf16 --grad-precision fp32 --no-sync --grad-clip 1e9",
    ],
    "llama_finetune": [
        "--low-cpu-fsdp --use-peft --fsdp-activation-checkpointing",
        "--precision bf16 --use-fp16 --freeze-layers 1",
        "--precision mixed --gradient-accumulation-steps 2 --fsdp-cpu-offload --sharding-strategy "
        "NO_SHARD",
    ],
    "pretrain_meta": [
        "--default-init --orig",
        "--strategy HYBRID_SHARD --precision bf16 --checkpoint-every 2",
        "--strategy _HYBRID_SHARD_ZERO2 --nameless-mesh --precision reduce --checkpoint-every 1 "
        "--checkpoint-after",
    ],
    "rlhf": ["--offload --hybrid", "--lora"],
    "flamingo": ["", "--strategy SHARD_GRAD_OP --precision amp_bf16 --flat"],
}

# Three losses: the second is of the first update, and the third of an update from the optimizer's
# state. The programs that evaluate at their end need two steps for that.
SHORT = {
    "nano_gpt": "--max-iters 3",
    "dit_ema": "--steps 3",
    "pretrain_meta": "--steps 3",
}

# FSDP1 adds up the squares of flat parameters and FSDP2 those of each parameter's shard, so the
# norm that gradients are clipped by moves by units in the last place (2e-7 seen), and what follows
# from it likewise.
CLIPPED = {
    "nano_gpt": "--grad-clip 0.2",
    "dit_ema": "--grad-clip 0.2 --policy class --strategy SHARD_GRAD_OP",
}
FLOAT32 = 1e-6

# T5's decoder blocks read the encoder's output twice each. fully_shard passes the inputs of a unit
# through a node of autograd, so the gradients of a block's two uses are added first and then those
# of the blocks; FSDP1 adds them one by one. In bfloat16 that moves gradients, and a loss that is a
# bfloat16 number, by a unit or two in the last place. Since torch 2.15 FSDP2 also casts each
# gradient of the tied embedding to reduce_dtype before they are added.
TIED = FLOAT32 if torch_version() < (2, 15) else torch.finfo(torch.bfloat16).eps
ENCODED = {
    "": FLOAT32,
    "--dropout 0.1 --clip 0.2": FLOAT32,
    "--strategy SHARD_GRAD_OP --precision bf16_working --offload": TIED,
    "--precision bf16": 2 * torch.finfo(torch.bfloat16).eps,
}

# How a program saves full state, and how a run of it goes on from that.
FULL = {
    "t5_summarize": ("--epochs 1 --out {at}", "--resume {at} --epochs 1"),
    "dit_ema": (
        "--save-at 2 --out {at} --grad-clip 1e9",
        "--resume {at} --fresh-optimizer --grad-clip 1e9",
    ),
    "nano_gpt": ("--save-at 2 --out {at}/ckpt.pt", "--init-from {at}/ckpt.pt"),
    "flamingo": (
        "--steps 1 --save-at 1 --out {at}/trained.pt",
        "--resume {at}/trained.pt --first 1",
    ),
}
# Each rank's own files, and directories of torch.distributed.checkpoint.
SHARDED = {
    "llama_finetune": ("--out {at}", "--dist-checkpoint {at}/sharded --first-epoch 1"),
    "pretrain_meta": ("--save-at 2 --ckpt {at}", "--ckpt {at}"),
    "dit_ema": ("--save-at 2 --out {at} --grad-clip 1e9", "--resume {at} --grad-clip 1e9"),
    "rlhf": ("--save-at 1 --out {at}", "--resume {at} --first 1"),
}


def difference(what, theirs, ours, bound=0.0):
    """A text where losses differ, else an empty one."""
    assert len({*theirs}) > 1, f"{what}: the losses stand still"
    if len(ours) == len(theirs) and all(
        math.isclose(a, b, rel_tol=bound) for a, b in zip(ours, theirs, strict=True)
    ):
        return ""
    return f"{what}\n    FSDP1   {theirs}\n    drop-in {ours}"


def fail_if_any(differences):
    """Together, since a rank that raised alone would leave the other one waiting."""
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, [text for text in differences if text])
    assert not any(everybodys), "\n".join(itertools.chain(*everybodys))


def compare(runs):
    """Run programs on both: name and arguments, with the bound of each: imports changed, or torch's
    class replaced.
    """
    differences = []
    for index, ((name, arguments), bound) in enumerate(runs):
        way = ("changed", "replaced")[index % 2]
        words = shlex.split(f"{SHORT.get(name, '')} {arguments}")
        ours, theirs = losses(name, words, way), torchs_losses(name, tuple(words))
        differences.append(difference(f"{name} {arguments} ({way})", theirs, ours, bound))
    fail_if_any(differences)


@pytest.mark.parametrize("name", VARIANTS)
@distributed(world_size=2, backend="gloo")
def test_losses_are_those_of_fsdp1(name):
    compare(((name, arguments), 0.0) for arguments in VARIANTS[name])


@distributed(world_size=2, backend="gloo")
def test_clipped_losses_are_those_of_fsdp1():
    compare((run, FLOAT32) for run in CLIPPED.items())


@distributed(world_size=2, backend="gloo")
def test_losses_of_an_encoder_and_decoder_are_those_of_fsdp1():
    compare((("t5_summarize", arguments), bound) for arguments, bound in ENCODED.items())


@distributed(world_size=2, backend="gloo")
def test_a_compiled_program_trains_as_on_fsdp1():
    compare([(("nano_gpt", "--compile eager --max-iters 1 --accumulation 1"), 0.0)])


@pytest.mark.parametrize("name", list(FULL))
@distributed(world_size=2, backend="gloo")
def test_full_checkpoints_go_both_ways(name, tmp_path):
    save, resume = FULL[name]
    bound = FLOAT32 if name == "t5_summarize" else 0.0
    ours = ("changed", "replaced")[list(FULL).index(name) % 2]
    for way in ("torch", ours):
        losses(name, shlex.split(save.format(at=tmp_path / way)), way)
    # What torch resumes from its own file, the drop-in resumes from it, or torch from the
    # drop-in's.
    expected = losses(name, shlex.split(resume.format(at=tmp_path / "torch")), "torch")
    by, of = [("torch", ours), (ours, "torch")][list(FULL).index(name) // 2 % 2]
    resumed = losses(name, shlex.split(resume.format(at=tmp_path / of)), by)
    fail_if_any([difference(f"{name}: {by} from {of}", expected, resumed, bound)])


@pytest.mark.parametrize("name", SHARDED)
@distributed(world_size=2, backend="gloo")
def test_a_program_resumes_from_its_own_sharded_checkpoint(name, tmp_path):
    save, resume = SHARDED[name]
    whole = losses(name, shlex.split(save.format(at=tmp_path)), "changed")
    ours = losses(name, shlex.split(resume.format(at=tmp_path)), "changed")
    theirs = torchs_losses(name, tuple(shlex.split(save.format(at=f"{tmp_path}-torch"))))
    fail_if_any(
        [difference(name, theirs, whole), difference(f"{name} resumed", theirs[-len(ours) :], ours)]
    )


def test_every_program_is_run():
    names = {path.stem for path in PROGRAMS.glob("*.py") if "def main(" in path.read_text()}
    assert names == {*VARIANTS, "t5_summarize"}
    assert not any("shardkit" in (PROGRAMS / f"{name}.py").read_text() for name in names)
