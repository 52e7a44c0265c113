"""Whole FSDP1 programs, as people write them, give the losses of torch's FSDP1 on the drop-in.

The programs are in ``programs/``, most after public ones and each with habits of its own. None is
changed but for the name of the package that it imports, or not at all, where its imports are
redirected. Sums over two ranks have one order, so losses are equal bit by bit, but where gradients
are clipped, which is bounded below.
"""

import itertools
import math
import shlex

import pytest
import torch.distributed as dist
from cpu_ranks import on_ranks
from program_runs import PROGRAMS, losses, torchs_losses

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

# How a program saves full state, and how a run of it goes on from that.
FULL = {
    "nano_gpt": ("--save-at 2 --out {at}/ckpt.pt", "--init-from {at}/ckpt.pt"),
}
# The program, who resumes it, and whose file that is.
FULL_BOTH_WAYS = [
    ("nano_gpt", "torch", "replaced"),
    ("nano_gpt", "changed", "torch"),
]
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
@on_ranks(2)
def test_losses_are_those_of_fsdp1(name):
    compare(((name, arguments), 0.0) for arguments in VARIANTS[name])


@on_ranks(2)
def test_clipped_losses_are_those_of_fsdp1():
    compare((run, FLOAT32) for run in CLIPPED.items())


@on_ranks(2)
def test_a_compiled_program_trains_as_on_fsdp1():
    compare([(("nano_gpt", "--compile eager --max-iters 1 --accumulation 1"), 0.0)])


@pytest.mark.parametrize(("name", "by", "of"), FULL_BOTH_WAYS)
@on_ranks(2)
def test_full_checkpoints_go_both_ways(name, by, of, tmp_path):
    save, resume = FULL[name]
    for way in ("torch", of):
        losses(name, shlex.split(save.format(at=tmp_path / way)), way)
    expected = losses(name, shlex.split(resume.format(at=tmp_path / "torch")), "torch")
    resumed = losses(name, shlex.split(resume.format(at=tmp_path / of)), by)
    fail_if_any([difference(f"{name}: {by} from {of}", expected, resumed)])


@pytest.mark.parametrize("name", SHARDED)
@on_ranks(2)
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
    assert names == VARIANTS.keys()
    assert not any("shardkit" in (PROGRAMS / f"{name}.py").read_text() for name in names)
