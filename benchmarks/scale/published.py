"""Throughput of FSDP that others published, and what the model of a step's time says for the same
runs.

Each series is one system, model and kind of GPU. The model is asked twice: with the rates of
``HARDWARE``, and with the rate of matrix products at which its first row comes out as published, so
that the other rows test what it says of more ranks. Tensor and pipeline parallel runs are left out
(torchtitan's 70B and 405B since 2024), and float8: a plan of FSDP2 says nothing of them. MFU counts
no checkpointed forwards, no embeddings, and full attention: so KempnerForge's 57.8 % is 54.5 %
here. KempnerForge and thunder keep parameters and AdamW's state in bf16, without float32 masters,
as llm-foundry does on A100s, which have 40 GB. fms-fsdp does not say how many blocks it
checkpoints: here as many as its HFU means over its MFU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MptConfig, PretrainedConfig

from benchmarks.scale.flops import Step, step_of
from benchmarks.scale.speed import HARDWARE, Hardware, step_time
from shardkit import MeshSpec, MixedPrecisionPolicy, ShardingPlan, plan_model
from shardkit.memory.allocations import OptimizerBytes
from shardkit.memory.strategies import changed
from shardkit.planning.dims import on_mesh

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ADAMW = OptimizerBytes.of("adamw")
GITHUB = "https://github.com"
TITAN = f"{GITHUB}/pytorch/torchtitan/blob/31a17bf/benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = f"{GITHUB}/will-thompson-k/torchtitan/blob/main/docs/performance.md"
FOUNDRY = f"{GITHUB}/mosaicml/llm-foundry/blob/4952183/scripts/train/benchmarking/README.md"
KEMPNER = (
    f"{GITHUB}/KempnerInstitute/KempnerForge/blob/abbbac3/benchmarks/mfu_scaling/mfu_scaling.md"
)
THUNDER = f"{GITHUB}/Lightning-AI/lightning-thunder/pull/940"
FMS = f"{GITHUB}/foundation-model-stack/fms-fsdp/blob/ed74fd5/README.md"


def llama(
    width: int, mlp: int, layers: int, heads: int, kv_heads: int, words: int, *, tied: bool = False
) -> LlamaConfig:
    """A config of a Llama's shape."""
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=words,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )


def mpt(width: int, layers: int) -> MptConfig:
    """A config of llm-foundry's shapes: heads of 128, four times as wide in between."""
    return MptConfig(
        d_model=width, n_heads=width // 128, n_layers=layers, vocab_size=50432, max_seq_len=2048
    )


def on_meta(config: PretrainedConfig) -> nn.Module:
    """The model without values."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def plan_of(model: nn.Module, *, checkpointed: float | str, resharded: bool = True) -> ShardingPlan:
    """The default plan in bfloat16 with float32 reductions, on one node; without ``resharded`` it
    is ZeRO-2.

    ``checkpointed`` is a share of the blocks, or ``"selective"``, in all of them.
    """
    kept = None if resharded else False
    plan = plan_model(model, mesh=MeshSpec.sharded(8), mp_policy=POLICY, reshard_after_forward=kept)
    found, selective = (
        [unit.name for unit in plan.units if unit.blocks],
        isinstance(checkpointed, str),
    )
    chosen = found if isinstance(checkpointed, str) else found[: round(checkpointed * len(found))]
    return changed(plan, chosen, checkpoint_activations="selective" if selective else True)


def token_batch(rows: int, positions: int) -> dict[str, torch.Tensor]:
    """One rank's micro-batch, without values."""
    ids = torch.empty(rows, positions, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Run:
    """One published number: tokens per second of a rank."""

    ranks: int
    rows: int  # sequences of one rank's micro-batch
    published: float


@dataclass(frozen=True)
class Series:
    """Runs of one system and model on growing numbers of ranks."""

    system: str
    source: str
    name: str
    config: Callable[[], PretrainedConfig]
    positions: int
    checkpointed: float | str  # the share of blocks, or "selective"
    hardware: Hardware
    runs: tuple[Run, ...]
    hybrid: bool = False  # HSDP within a node
    resharded: bool = True  # after forward

    @cached_property
    def model(self) -> nn.Module:
        """On the meta device."""
        return on_meta(self.config())

    @cached_property
    def plan(self) -> ShardingPlan:
        """On one node."""
        return plan_of(self.model, checkpointed=self.checkpointed, resharded=self.resharded)

    @property
    def flops_per_token(self) -> float:
        """As benchmarks/README.md counts them."""
        config, linear = (
            self.config(),
            (each for each in self.model.modules() if isinstance(each, nn.Linear)),
        )
        attention: int = 12 * config.num_hidden_layers * config.hidden_size * self.positions
        return 6 * sum(each.weight.numel() for each in linear) + attention

    def traced(self, rows: int, *, checkpointed: float | str) -> Step:
        """One rank's step."""
        plan = plan_of(self.model, checkpointed=checkpointed, resharded=self.resharded)
        return step_of(self.model, plan, token_batch(rows, self.positions))

    def tokens_per_second(self, run: Run, step: Step, hardware: Hardware) -> float:
        """Of a rank, by the model of a step's time."""
        node = hardware.ranks_per_node
        hybrid = self.hybrid and run.ranks > node
        mesh = MeshSpec.hybrid(run.ranks // node, node) if hybrid else MeshSpec.sharded(run.ranks)
        return (
            run.rows
            * self.positions
            / step_time(on_mesh(self.plan, mesh), step, hardware, ADAMW).total
        )


@dataclass(frozen=True)
class Compared:
    """A published number beside the model's."""

    series: Series
    run: Run
    mfu: float  # of the published number
    modeled: float  # with the rates of HARDWARE
    fitted: float | None  # with the rate that the series' first row reached; None for that row
    share: float  # that rate, as a share of HARDWARE's

    @property
    def error(self) -> float:
        """Of the model, as a share of the published number."""
        return self.modeled / self.run.published - 1

    @property
    def fitted_error(self) -> float | None:
        """The same for the fitted rate."""
        return None if self.fitted is None else self.fitted / self.run.published - 1


def solved(grows: Callable[[float], float], wanted: float, highest: float) -> float:
    """Where a function that grows has the wanted value, by bisection."""
    low, high = 0.0, highest
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if grows(middle) < wanted else (low, middle)
    return high


def compare(series: Series) -> Iterator[Compared]:
    """Every run of a series; a trace for each micro-batch."""
    peak = 312e12 if series.hardware.name == "a100" else 989e12
    rate = 0.0
    for number, run in enumerate(series.runs):
        step = series.traced(run.rows, checkpointed=series.checkpointed)

        def speed(rate: float, run: Run = run, step: Step = step) -> float:
            return series.tokens_per_second(run, step, replace(series.hardware, matmul_flops=rate))

        rate = rate if number else solved(speed, run.published, 2 * peak)
        mfu = series.flops_per_token * run.published / peak
        fitted = speed(rate) if number else None
        modeled = speed(series.hardware.matmul_flops)
        yield Compared(series, run, mfu, modeled, fitted, rate / series.hardware.matmul_flops)


# throughput, from 128 to 2,048 H100s, Llama 2 7B
LOST, FAR_SOURCE = 0.37, "https://arxiv.org/html/2411.13055"


def far(hardware: Hardware) -> tuple[float, float]:
    """What the model says was lost there, and the latency between nodes, in seconds a hop, at which
    that is ``LOST``.

    The micro-batch, 2 sequences of 4,096 tokens, is an assumption.
    """
    series = Series("", FAR_SOURCE, "Llama 2 7B", llama_2_7b, 4096, False, hardware, ())
    step = series.traced(2, checkpointed=False)

    def lost(latency: float) -> float:
        rates = replace(hardware, network_latency=latency)
        few, many = (
            series.tokens_per_second(Run(ranks, 2, 0), step, rates) for ranks in (128, 2048)
        )
        return 1 - many / few

    return lost(hardware.network_latency), solved(lost, LOST, 1e-3)


H100, A100 = HARDWARE["h100"], HARDWARE["a100"]
GRAND_TETON = replace(H100, memory_bandwidth=2.4e12)  # HBM2e, 500 W
VELA = replace(A100, network_bandwidth=400e9 / 8 / 8)  # 400 Gbit/s for a node of 8
VELA_H100 = replace(H100, network_bandwidth=800e9 / 8 / 8)


def llama_8b() -> LlamaConfig:
    """Llama 3.1 8B."""
    return llama(4096, 14336, 32, 32, 8, 128256)


def llama_2_7b() -> LlamaConfig:
    """Llama 2 7B."""
    return llama(4096, 11008, 32, 32, 32, 32000)


def llama_70b() -> LlamaConfig:
    """Llama 3.1 70B."""
    return llama(8192, 28672, 80, 64, 8, 128256)


def _runs(*runs: tuple[int, int, float]) -> tuple[Run, ...]:
    return tuple(Run(*run) for run in runs)


def _foundry(
    name: str,
    width: int,
    layers: int,
    checkpointed: bool,
    hardware: Hardware,
    *runs: tuple[int, int, float],
) -> Series:
    return Series(
        "llm-foundry",
        FOUNDRY,
        name,
        lambda: mpt(width, layers),
        2048,
        checkpointed,
        hardware,
        _runs(*runs),
    )


def _fms(
    name: str,
    config: tuple[int, ...],
    checkpointed: float,
    published: tuple[float, float],
    *,
    hybrid: bool = False,
) -> Iterator[Series]:
    for hardware, ranks, speed in ((VELA, 128, published[0]), (VELA_H100, 96, published[1])):
        shape, runs = functools.partial(llama, *config), _runs((ranks, 2, speed))
        yield Series(
            "fms-fsdp, compiled", FMS, name, shape, 4096, checkpointed, hardware, runs, hybrid
        )


def _thunder(how: str, published: float) -> Series:
    runs = _runs((8, 1, published))
    return Series(how, THUNDER, "Llama 2 7B", llama_2_7b, 4096, False, H100, runs, resharded=False)


def _titan(how: str, *runs: tuple[int, int, float]) -> Series:
    return Series(how, TITAN, "Llama 8B", llama_8b, 8192, "selective", GRAND_TETON, _runs(*runs))


SERIES = (
    Series(
        "KempnerForge, compiled",
        KEMPNER,
        "Llama 8B",
        llama_8b,
        4096,
        True,
        HARDWARE["h200"],
        _runs((1, 4, 10471), (2, 4, 9364), (4, 4, 9746)),
    ),
    _thunder("FSDP2 with thunder, ZeRO-2", 12493),
    _thunder("FSDP2, compiled, ZeRO-2", 11856),
    _thunder("FSDP2, eager, ZeRO-2", 9325),
    _thunder("FSDP1, compiled, ZeRO-2", 10185),
    _titan("torchtitan, compiled", (8, 2, 6667), (128, 2, 6514)),
    _titan("torchtitan", (8, 2, 5762), (128, 2, 5605)),
    Series(
        "torchtitan, 2024",
        TITAN_A100,
        "Llama 8B",
        llama_8b,
        8192,
        False,
        A100,
        _runs((64, 1, 2973)),
    ),
    Series(
        "torchtitan, 2024",
        TITAN_A100,
        "Llama 70B",
        llama_70b,
        8192,
        True,
        A100,
        _runs((64, 1, 331)),
    ),
    _foundry("MPT 1B", 2048, 24, False, H100, (16, 20, 46037), (32, 20, 45130), (64, 20, 44402)),
    _foundry(
        "MPT 7B",
        4096,
        32,
        False,
        H100,
        (8, 6, 10643),
        (128, 6, 10475),
        (256, 6, 10119),
        (512, 6, 9670),
    ),
    _foundry(
        "MPT 13B", 5120, 40, False, H100, (8, 2, 4792), (16, 2, 4767), (32, 2, 4811), (64, 2, 4800)
    ),
    _foundry("MPT 7B", 4096, 32, True, A100, (32, 18, 3725), (64, 18, 3665), (128, 18, 3623)),
    _foundry("MPT 13B", 5120, 40, True, A100, (32, 14, 1998), (64, 16, 1976), (128, 16, 1972)),
    *_fms("Llama 2 7B", (4096, 11008, 32, 32, 32, 32000), 0, (4550, 9600), hybrid=True),
    *_fms("Llama 2 13B", (5120, 13824, 40, 40, 40, 32000), 1 / 3, (2150, 4850)),
    *_fms("Llama 2 34B", (8192, 22016, 48, 64, 8, 32000), 1, (820, 1830)),
    *_fms("Llama 2 70B", (8192, 28672, 80, 64, 8, 32000), 1, (410, 890)),
)
