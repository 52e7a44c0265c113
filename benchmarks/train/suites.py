"""What is measured, the most valuable first."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from benchmarks.train.case import Case
from benchmarks.train.group import Group, Suite

# Full cards need segments that grow, or what is free is in pieces. Comparisons keep the default:
# there, what is reserved beyond what is allocated is one of the results.
GROWING = "expandable_segments:True"
Changes: TypeAlias = dict[str, dict[str, object]]


def variants(base: Case, changes: Changes) -> tuple[Case, ...]:
    """Copies of a case, each with a suffix to its name and some fields changed."""
    return tuple(
        replace(base, name=f"{base.name}-{name}", **fields) for name, fields in changes.items()
    )  # type: ignore[arg-type]


def sides(base: Case, *names: str) -> tuple[Case, ...]:
    """The same case by several sides."""
    return variants(base, {name: {"side": name} for name in names})


def engines() -> list[Group]:
    """The comparisons that the goals are about, one rank of 8 pretended ones; then what a GPU can
    do at all.
    """
    small = Case("1b", "shardkit", "1B", fake_ranks=8, micro_batch=4)
    large = Case("8b", "shardkit", "8B", fake_ranks=8)
    short = replace(large, name="8b-512", sequence=512)
    bare = replace(small, name="1b-bare", side="bare", fake_ranks=0)
    return [
        Group(
            "8b-engines",
            sides(large, "shardkit", "expert", "naive", "fsdp1"),
            steps=3,
            watch=("8b-shardkit", "8b-naive"),
        ),
        Group(
            "1b-engines",
            (*sides(small, "shardkit", "expert", "naive", "fsdp1"), bare),
            "together",
            3,
            3,
        ),
        Group("8b-peaks", sides(short, "shardkit", "naive", "expert"), rounds=2),
        Group("ceilings", (Case("ceilings", "bare", "8B"),), "ceilings"),
    ]


def one_gpu() -> list[Group]:
    """Model FLOPs utilization of one GPU that holds everything."""
    large = Case("8b-one", "shardkit", "8B", compile=True, stepping="in_backward")
    small = Case("1b-one", "shardkit", "1B", compile=True)
    # 8B with AdamW's two moments is 90 of 139 GiB, with gradients 120; they come while activations
    # go. Predicted by shardkit.memory, without compilation: 122 GiB at 4,096 tokens either way, 150
    # at twice as many.
    batches: Changes = {
        "4k": {},
        "2x4k-selective": {"micro_batch": 2, "checkpointing": "selective"},
        "4k-adamw": {"stepping": "fused"},
    }
    return [
        Group("8b-one", variants(large, batches), "each", 2, 3, 3, GROWING),
        Group("1b-one", variants(small, {"4x4k": {"micro_batch": 4}}), "each", 2, 3, 3),
    ]


def anchors() -> list[Group]:
    """Two published configurations, like for like: both keep parameters and AdamW's state in
    bfloat16 alone.

    KempnerForge's Llama 8B on one H200 (benchmarks/mfu_scaling of its repository), and FSDP2 with
    thunder, a Llama 2 7B on 8 H100s (pull 940 of lightning-thunder), here one rank of 8 without
    communication. thunder reduces in bfloat16.
    """
    base = Case("anchor", "shardkit", "8B", compile=True, masters=False)
    kempner = replace(base, name="8b-kempner", micro_batch=4, checkpointing="unit")
    thunder = replace(base, name="7b-thunder", model="7B", fake_ranks=8, reshard=False)
    return [Group(case.name, (case,), "each", 1, 3) for case in (kempner, thunder)]


def whole_world() -> list[Group]:
    """Every side on one GPU with 1B: what is there is compared by values too."""
    base = Case("1b-world1", "shardkit", "1B")
    names = ("shardkit", "bare", "expert", "naive", "fsdp1", "ddp", "accelerate", "lightning")
    return [Group("1b-world1", sides(base, *names), rounds=2, steps=3)]


def axes() -> list[Group]:
    """8B as one rank of 8, one setting changed at a time; compilation is in ``anchors``."""
    base = Case("8b-axis", "shardkit", "8B", fake_ranks=8)
    settings: Changes = {
        "unit": {"checkpointing": "unit"},
        "selective": {"checkpointing": "selective"},
        "no-reshard": {"reshard": False},
        "reshard-4": {"reshard": 4},
        "hsdp": {"replicas": 2},
        "in-backward": {"stepping": "in_backward"},
        "local": {"stepping": "local"},
        "budget-40": {"side": "shardkit-budget", "budget_gib": 40.0},
        "offload": {"offload": True},
    }
    return [Group("8b-axes", variants(base, settings), "each", 1, 2)]


def worlds() -> list[Group]:
    """8B as one rank of more, and 70B."""
    many = Case("8b-fake256", "shardkit", "8B", fake_ranks=256)
    large = Case(
        "70b-fake64", "shardkit", "70B", fake_ranks=64, checkpointing="unit", sequence=1024
    )
    return [Group(case.name, sides(case, "shardkit"), "each", 1, 2) for case in (many, large)]


def batches() -> list[Group]:
    """1B as one rank of 8: micro-batches, a long sequence, FSDP1's strategies, packages, float32,
    transformers.
    """
    base = Case("1b-axis", "shardkit", "1B", fake_ranks=8)
    many: Changes = {f"{count}x4k": {"micro_batch": count} for count in (1, 2, 4, 8)}
    plain: Changes = {
        f"bare-{count}x4k": {"micro_batch": count, "side": "bare", "fake_ranks": 0}
        for count in (1, 4)
    }
    lengths: Changes = {"1x16k": {"sequence": 16_384}}
    others: Changes = {
        "float32": {"bf16": False},
        "hf": {"model": "hf-1B"},
        "foreach": {"stepping": "foreach"},
        "hf-expert": {"model": "hf-1B", "side": "expert"},
    }
    names = ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    rows: Changes = {
        f"fsdp1-{name.lower().strip('_').replace('_', '-')}": {
            "side": "fsdp1",
            "strategy": name,
            "replicas": 2 if "HYBRID" in name else 1,
        }
        for name in names
    }
    peers: Changes = {
        **rows,
        "ddp": {"side": "ddp"},
        "accelerate": {"side": "accelerate"},
        "lightning": {"side": "lightning"},
    }
    return [
        Group("1b-batches", variants(base, many | plain | lengths), "each", 1, 3),
        Group("1b-strategies", variants(base, peers), "each", 1, 3),
        Group("1b-others", variants(base, others), "each", 1, 2),
    ]


def h200() -> Suite:
    """For one H200; on several GPUs the same cases measure scaling."""
    outside = Case("outside", "shardkit", "1B", fake_ranks=8)
    disk = Case("disk", "shardkit", "8B")
    step, files = Group("outside", (outside,), "outside", rounds=20), Group("disk", (disk,), "disk")
    groups = [
        *engines(),
        *one_gpu(),
        *anchors(),
        step,
        *whole_world(),
        *axes(),
        files,
        *batches(),
        *worlds(),
    ]
    return Suite("h200", tuple(groups), device="cuda", minutes=9.0)


def one_card(gib: float = 141) -> Suite:
    """For one lent GPU and few minutes, the most valuable groups first.

    On 100 GiB or less 8B is trained whole with parameters and moments in bfloat16 (16 and 32 GB)
    and gradients freed in backward, and KempnerForge's configuration is left out.
    """
    full = {group.name: group for group in h200().groups}
    lean = Case(
        "8b-lean",
        "shardkit",
        "8B",
        compile=True,
        masters=False,
        stepping="in_backward",
        checkpointing="selective",
    )
    both = (lean, replace(lean, name="8b-lean-naive", side="naive"))
    is_large = gib > 100
    whole = full["8b-one"] if is_large else Group("8b-lean", both, "each", 1, 3, 3, GROWING)
    order = [full["8b-engines"], full["1b-engines"], full["1b-one"], whole]
    order += [full[name] for name in ("8b-peaks", "outside", "ceilings", "1b-world1")]
    if is_large:
        order.append(full["8b-kempner"])
    order += [full[name] for name in ("7b-thunder", "8b-axes", "1b-batches", "1b-strategies")]
    order.append(full["70b-fake64"])
    return Suite("gpu", tuple(order), device="cuda")


def without_compiler(suite: Suite) -> Suite:
    """The cases that torch.compile is not needed for."""
    groups = []
    for group in suite.groups:
        cases = tuple(case for case in group.cases if not case.compile)
        if cases:
            groups.append(replace(group, cases=cases))
    return replace(suite, groups=tuple(groups))


def on_cpu(suite: Suite) -> Suite:
    """The same groups and cases with a tiny model. Their times say nothing."""
    groups = []
    for group in without_compiler(suite).groups:
        cases = []
        for case in group.cases:
            if case.offload:  # into pinned memory, which needs an accelerator
                continue
            hub = "hf-" if case.model.startswith("hf-") else ""
            small = replace(case, model=f"{hub}tiny", sequence=32, micro_batch=1)
            budget = 1.0 if case.budget_gib else None
            cases.append(replace(small, bf16=False, masters=True, budget_gib=budget))
        groups.append(
            replace(group, cases=tuple(cases), rounds=min(group.rounds, 2), steps=1, allocator="")
        )
    return replace(suite, groups=tuple(groups), device="cpu", fresh=False)


def smoke() -> Suite:
    """The same code with a tiny model on a CPU: every side, every kind of group. Its times say
    nothing.
    """
    base = Case("tiny", "shardkit", "tiny", sequence=32, bf16=False)
    names = (
        "shardkit",
        "bare",
        "expert",
        "naive",
        "fsdp1",
        "ddp",
        "shardkit-budget",
        "accelerate",
        "lightning",
    )
    real = tuple(
        replace(case, budget_gib=1.0 if "budget" in case.side else None)
        for case in sides(base, *names)
    )
    pretended = replace(base, name="tiny-fake8", fake_ranks=8)
    bare = replace(base, name="tiny-fake8-bare", side="bare")
    one_of_8 = (*sides(pretended, "shardkit", "expert", "naive", "fsdp1"), bare)
    settings: Changes = {
        "bf16-unit": {"bf16": True, "checkpointing": "unit"},
        "in-backward": {"stepping": "in_backward"},
        "2x32": {"micro_batch": 2},
        "hsdp": {"replicas": 2, "fake_ranks": 8},
    }
    rows = variants(base, settings)
    return Suite(
        "smoke",
        (
            Group("engines", one_of_8, "together", 2, 2, 1, watch=("tiny-fake8-shardkit",)),
            Group("world1", real, "apart", 2, 2, 2),
            Group("axes", rows[:3], "each", 1, 1, 1),
            Group("hsdp", rows[3:], "each", 1, 1, 1),
            Group("ceilings", (Case("ceilings", "bare", "tiny"),), "ceilings"),
            Group("outside", (replace(pretended, name="outside"),), "outside", rounds=2),
            Group("disk", (replace(base, name="disk"),), "disk"),
        ),
        device="cpu",
        fresh=False,
    )


SUITES = {"h200": h200, "gpu": one_card, "smoke": smoke}
