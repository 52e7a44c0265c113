"""Models of other libraries, plain and under ``shard_model(model)``: two steps of SGD on two ranks.

About 15 minutes, and ``[library[/model] ...]`` for some:
``PYTHONPATH=.:tests/helpers python benchmarks/sweeps/other_libraries.py``.
Libraries that are not installed are left out. What is wrong, refused or raises is tried with
``fully_shard`` by hand on the same units.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers_models import ROUNDING, Shard, outcome, square_of, verdict
from verdicts import sweep
from zoo_entry import floats, integers

from shardkit.testing import RankPool

Make = Callable[[int], Any]
Models = dict[str, tuple[Callable[[], nn.Module], list[Make] | dict[str, Make]]]

# A constructor gets those of these that it takes.
DIFFUSERS: dict[str, Any] = {
    "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4,
    "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "out_channels": 4, "sample_size": 8,
    "norm_num_groups": 4, "cross_attention_dim": 16, "caption_channels": 16, "joint_attention_dim": 16,
    "caption_projection_dim": 16, "pooled_projection_dim": 8, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32,
    "num_mmdit_layers": 2, "num_single_dit_layers": 2, "axes_dims_rope": (2, 2, 4), "block_out_channels": (8, 16),
    "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1, "layers_per_block": 1,
}  # fmt: skip
MONAI: dict[str, Any] = {
    "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16), "strides": (2,), "img_size": 32,
    "features": (4, 4, 8, 8, 16, 4), "feature_size": 12, "hidden_size": 16, "mlp_dim": 32, "num_layers": 2,
    "num_heads": 2, "patch_size": 8, "init_filters": 8, "init_features": 8, "block_config": (1, 2), "block": "basic",
    "layers": [1, 1, 1, 1], "block_inplanes": [4, 8, 8, 16], "n_input_channels": 1, "num_res_blocks": (1, 1),
    "attention_levels": (False, True), "norm_num_groups": 4, "num_head_channels": 8, "latent_channels": 2,
    "dropout_prob_up": (0.5, 0.5),
}  # fmt: skip
VIT: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32,
    "cls_depth": 1, "s1_emb_dim": 8, "s2_emb_dim": 8, "s3_emb_dim": 8, "s3_depth": 1, "s2_heads": 2, "s3_heads": 2,
}  # fmt: skip

# The smallest model of each file of timm, where it is small. The second take their image's size.
TIMM = """
test_byobnet test_convnext cpubone_nano csatv2 cs3darknet_focus_s cspnext_tiny densenet121 dla46x_c dpn48b test_nfnet
edgenext_xx_small mnasnet_small efficientvim_m1 efficientvit_b0 fasternet_t0 fastvit_t8 ghostnet_050 hgnetv2_b0
hrnet_w18_small iformer_t inception_next_atto lcnetv2_small test_mambaout poolformerv2_s12 mobilevit_xxs pvt_v2_b0
regnetx_002 repghostnet_050 repvit_m1 resnest14d resnet10t rexnet_100 shvit_s1 skresnet18 starnet_s050 tiny_vit_5m_224
"""
TIMM_SIZED = """
cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224 efficientformerv2_s0 efficientvit_m0 eva02_tiny_patch14_224
gcvit_xxtiny levit_128s test_coatnet gmlp_ti16_224 pit_ti_224 swiftformer_xs visformer_tiny test_vit xcit_nano_12_p8_224
"""


def real(*shape: int) -> Make:
    return lambda seed: floats(seed, *shape)


def whole(high: int, *shape: int) -> Make:
    return lambda seed: integers(seed, high, *shape)


def small(
    made: Callable[..., nn.Module], sizes: dict[str, Any], **own: Any
) -> Callable[[], nn.Module]:
    taken = inspect.signature(made).parameters
    return functools.partial(
        made, **{name: value for name, value in sizes.items() if name in taken} | own
    )


def timm() -> Models:
    from timm import create_model as make

    sized = {name: {"img_size": 64} for name in TIMM_SIZED.split()}
    names, batch = [*TIMM.split(), *sized], [real(2, 3, 64, 64)]
    return {
        name: (functools.partial(make, name, num_classes=5, **sized.get(name, {})), batch)
        for name in names
    }


def diffusers() -> Models:
    import diffusers as d

    image, packed, picture = real(2, 4, 8, 8), real(2, 16, 4), real(2, 3, 16, 16)
    time, text = whole(900, 2), real(2, 5, 16)
    made: dict[str, Make] = {
        "timestep": time, "encoder_hidden_states": text, "pooled_projections": real(2, 8), "img_ids": real(16, 3),
        "txt_ids": real(5, 3), "encoder_attention_mask": lambda seed: torch.ones(2, 5).bool(),
        "class_labels": whole(9, 2),
    }  # fmt: skip
    hidden = {"SD3": image, "AuraFlow": image, "Sana": image, "DiT": image, "PixArt": image, "Flux": packed,
              "Chroma": packed}  # fmt: skip

    def transformer(kind: Any, hidden_states: Make) -> Any:
        taken = inspect.signature(kind.forward).parameters
        batch = {key: make for key, make in made.items() if key in taken}
        return small(kind, DIFFUSERS), {"hidden_states": hidden_states} | batch

    coder = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    coder |= {"in_channels": 3, "out_channels": 3}
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    unet = {
        "down_block_types": down,
        "up_block_types": up,
        "attention_head_dim": 2,
        "num_attention_heads": None,
    }
    wan = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1, "dim_mult": [1, 1, 1, 1]}
    return {
        **{
            name: transformer(getattr(d, f"{name}Transformer2DModel"), states)
            for name, states in hidden.items()
        },
        "Wan": transformer(d.WanTransformer3DModel, real(2, 4, 2, 8, 8)),
        "UNet2DCondition": (small(d.UNet2DConditionModel, DIFFUSERS, **unet), [image, time, text]),
        "AutoencoderKL": (small(d.AutoencoderKL, DIFFUSERS, **coder), [picture]),
        "VQ": (small(d.VQModel, DIFFUSERS, **coder, num_vq_embeddings=16), [picture]),
        "AutoencoderKLWan": (functools.partial(d.AutoencoderKLWan, **wan), [real(1, 3, 5, 16, 16)]),
    }


def monai() -> Models:
    from monai.networks import nets as n

    plane = real(2, 1, 32, 32)
    names = (
        "UNet BasicUNet BasicUNetPlusPlus SegResNet SegResNetDS DenseNet ResNet ViT AutoencoderKL "
        "VNet UNETR"
    )
    return {
        **{name: (small(getattr(n, name), MONAI), [plane]) for name in names.split()},
        "DiffusionModelUNet": (small(n.DiffusionModelUNet, MONAI), [plane, whole(900, 2)]),
    }


def vit_pytorch() -> Models:
    names = """vit:ViT deepvit:DeepViT cait:CaiT parallel_vit:ViT vit_for_small_dataset:ViT vit_with_patch_dropout:ViT
        vit_with_patch_merger:ViT learnable_memory_vit:ViT normalized_vit:nViT cvt:CvT xcit:XCiT rvt:RvT
        simple_vit:SimpleViT simple_vit_with_qk_norm:SimpleViT simple_vit_with_value_residual:SimpleViT
        simple_uvit:SimpleUViT jumbo_vit:JumboViT"""
    pairs = [name.split(":") for name in names.split()]
    kinds = {
        file: getattr(importlib.import_module(f"vit_pytorch.{file}"), kind) for file, kind in pairs
    }
    return {file: (small(kind, VIT), [real(2, 3, 32, 32)]) for file, kind in kinds.items()}


def x_transformers() -> Models:
    import x_transformers as x

    def language(flag: str, value: Any) -> nn.Module:
        layers = x.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **{flag: value})
        return x.TransformerWrapper(
            num_tokens=11, max_seq_len=16, attn_layers=layers, tie_embedding=value is True
        )

    flags = """ff_glu use_rmsnorm rotary_pos_emb alibi_pos_bias rel_pos_bias sandwich_norm gate_residual macaron
        attn_qk_norm scale_residual shift_tokens use_scalenorm use_dynamic_tanh add_value_residual attn_gate_values
        integrate_layers attn_on_attn weight_tie_layers"""
    values = dict.fromkeys(flags.split(), True) | {
        "num_residual_streams": 2,
        "attn_num_mem_kv": 2,
        "attn_kv_heads": 1,
    }
    return {
        flag: (functools.partial(language, flag, value), [whole(11, 2, 8)])
        for flag, value in values.items()
    }


def e3nn() -> Models:
    from e3nn import nn as en
    from e3nn import o3

    irreps, x = "8x0e+4x1o", real(4, 20)
    product = functools.partial(o3.FullyConnectedTensorProduct, irreps, "1x0e+1x1o", "8x0e")

    def between(make: Callable[[], nn.Module], width: int) -> Any:
        return lambda: nn.Sequential(o3.Linear(irreps, irreps), make(), nn.Linear(width, 1)), [x]

    return {
        "linear": between(lambda: o3.Linear(irreps, "5x0e"), 5),
        "gate": between(lambda: en.Gate("4x0e", [torch.tanh], "4x0e", [torch.sigmoid], "4x1o"), 16),
        "batch_norm": between(lambda: en.BatchNorm(irreps), 20),
        "tensor_product": (product, [x, real(4, 4)]),
    }


def torchvision() -> Models:
    from torchvision import models as v

    names = (
        "resnet18 mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_0 mnasnet0_5 regnet_y_400mf "
        "efficientnet_b0"
    )
    return {
        name: (functools.partial(getattr(v, name), num_classes=5), [real(2, 3, 64, 64)])
        for name in names.split()
    }


def denoising_diffusion_pytorch() -> Models:
    import denoising_diffusion_pytorch as d

    image, time = real(2, 3, 16, 16), whole(900, 2)
    unet = functools.partial(d.Unet, dim=8, dim_mults=(1, 2))
    karras = {
        "dim": 8,
        "dim_max": 16,
        "num_downsamples": 2,
        "num_blocks_per_stage": 1,
        "attn_res": (8,),
    }
    return {
        "unet": (unet, [image, time]),
        "unet_1d": (functools.partial(d.Unet1D, dim=8, dim_mults=(1, 2)), [real(2, 3, 32), time]),
        "karras": (
            functools.partial(d.KarrasUnet, image_size=16, channels=3, **karras),
            [image, real(2)],
        ),
        "gaussian": (lambda: d.GaussianDiffusion(unet(), image_size=16), [image]),
        "elucidated": (
            lambda: d.ElucidatedDiffusion(unet(random_fourier_features=True), image_size=16),
            [image],
        ),
    }


def normflows() -> Models:
    import normflows as n

    f, mlp = n.flows, n.nets.MLP
    flows: dict[str, Callable[[], nn.Module]] = {
        "real_nvp": lambda: f.MaskedAffineFlow(
            torch.tensor([1.0, 0.0, 1.0, 0.0]), mlp([4, 8, 4]), mlp([4, 8, 4])
        ),
        "planar": lambda: f.Planar(4, "leaky_relu"),
        "autoregressive": lambda: f.MaskedAffineAutoregressive(4, 8),
        "spline": lambda: f.CoupledRationalQuadraticSpline(4, 1, 8),
        "act_norm": lambda: f.ActNorm(4),
        "lu": lambda: f.LULinearPermute(4),
        "residual": lambda: f.Residual(n.nets.LipschitzMLP([4, 8, 4])),
    }
    kind = type("Likelihood", (n.NormalizingFlow,), {"forward": n.NormalizingFlow.forward_kld})

    def build(flow: Callable[[], nn.Module]) -> nn.Module:
        return kind(n.distributions.DiagGaussian(4), [flow() for _ in range(3)])

    return {name: (functools.partial(build, flow), [real(8, 4)]) for name, flow in flows.items()}


EACH = (
    timm,
    diffusers,
    monai,
    vit_pytorch,
    x_transformers,
    e3nn,
    torchvision,
    denoising_diffusion_pytorch,
    normflows,
)
TABLES: dict[str, Callable[[], Models]] = {each.__name__: each for each in EACH}


@functools.cache
def models_of(library: str) -> Models:
    """The table of a library; empty where it is not installed."""
    return TABLES[library]() if importlib.util.find_spec(library) else {}


def loss_of(batch: list[Make] | dict[str, Make], model: nn.Module, seed: int) -> Tensor:
    if isinstance(batch, dict):
        return square_of(model(**{name: make(seed) for name, make in batch.items()}))
    return square_of(model(*(make(seed) for make in batch)))


def outcome_of(library: str, name: str, shard: Shard) -> tuple[str, str]:
    build, batch = models_of(library)[name]
    return outcome(build, functools.partial(loss_of, batch), shard, lr=0.01)


def main(chosen: list[str]) -> None:
    counts = {}
    with RankPool(2, timeout=240) as pool:
        for library in TABLES:
            names = [
                name
                for name in models_of(library)
                if not chosen or {library, f"{library}/{name}"} & {*chosen}
            ]
            print(f"{library}: {len(names)}", flush=True)
            counts[library] = sweep(names, functools.partial(verdict, pool, outcome_of, library))
    counts["sum"] = sum(counts.values(), Counter[str]())
    kinds = ("equal", "within rounding", "refused", "wrong", "error", "not run")
    print(
        f"{'':28}",
        *(f"{kind:>15}" for kind in kinds),
        f"  (rounding: {ROUNDING:g} of a tensor's largest element)",
    )
    for library, count in counts.items():
        print(f"{library:28}", *(f"{count[kind]:15}" for kind in kinds))


if __name__ == "__main__":
    main(sys.argv[1:])
