"""Models of many kinds, as published and in their real sizes, each with the units that an expert
would write by hand.

For ``benchmarks.default_rule``. Nothing is downloaded. A package that is not installed leaves its
models out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class Case(NamedTuple):
    """A model, one rank's micro-batch, and an expert's units as globs."""

    name: str
    make: Callable[[], nn.Module]
    batch: Any
    units: tuple[str, ...]
    tail: tuple[str, ...] = ()  # norm and head, one unit that stays gathered after forward


def cases() -> Iterator[Case]:
    """Yield the models whose packages are installed."""
    for package in (
        _language_models,
        _other_transformers,
        _timm,
        _diffusers,
        _ddpm,
        _torchvision,
        _monai,
        _recommendation,
    ):
        try:
            yield from package()
        except ImportError as error:
            print(f"left out, {error}: {package.__name__}")


def _tokens(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.long)


def _language_models() -> Iterator[Case]:
    import transformers as hf

    def of(config: Any, dtype: torch.dtype = torch.float32) -> Callable[[], nn.Module]:
        return lambda: hf.AutoModelForCausalLM.from_config(config, dtype=dtype)

    tokens = {"input_ids": _tokens(2048), "labels": _tokens(2048), "use_cache": False}
    llama = hf.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256
    )
    usual, tail = ("model.embed_tokens", "model.layers.*"), ("model.norm", "lm_head")
    # On fake tensors torch 2.14 refuses the grouped product of experts in float32: those two are in
    # bfloat16.
    yield Case("Llama 8B", of(llama), tokens, usual, tail)
    yield Case("Qwen3 8B", of(hf.Qwen3Config()), tokens, usual, tail)
    yield Case("Mixtral 8x7B", of(hf.MixtralConfig(), torch.bfloat16), tokens, usual, tail)
    yield Case("Qwen3-MoE", of(hf.Qwen3MoeConfig(), torch.bfloat16), tokens, usual, tail)
    yield Case(
        "Gemma 3",
        of(hf.Gemma3TextConfig()),
        tokens,
        ("model.layers.*",),
        ("model.embed_tokens", *tail),
    )
    tokens = {"input_ids": _tokens(1024), "labels": _tokens(1024), "use_cache": False}
    gpt2 = hf.GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    tail = ("transformer.wte", "transformer.ln_f", "lm_head")
    yield Case("GPT-2 XL", of(gpt2), tokens, ("transformer.h.*",), tail)
    opt = hf.OPTConfig(
        hidden_size=4096, ffn_dim=16384, num_hidden_layers=32, num_attention_heads=32
    )
    tail = ("model.decoder.embed_tokens", "model.decoder.final_layer_norm", "lm_head")
    yield Case("OPT 6.7B", of(opt), tokens, ("model.decoder.layers.*",), tail)


def _other_transformers() -> Iterator[Case]:
    import transformers as hf

    both = {"input_ids": _tokens(512), "labels": _tokens(512)}
    t5 = hf.T5Config(decoder_start_token_id=0, d_model=1024, d_ff=4096, num_layers=24, num_heads=16)
    shared = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    blocks = ("encoder.block.*", "decoder.block.*")
    yield Case("T5 large", lambda: hf.T5ForConditionalGeneration(t5), both, blocks, shared)
    blocks = ("model.encoder.layers.*", "model.decoder.layers.*")
    shared = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    yield Case(
        "BART large", lambda: hf.BartForConditionalGeneration(hf.BartConfig()), both, blocks, shared
    )
    whisper = hf.WhisperConfig(
        d_model=1280, encoder_layers=32, decoder_layers=32, encoder_attention_heads=20, decoder_attention_heads=20,
        encoder_ffn_dim=5120, decoder_ffn_dim=5120, num_mel_bins=128,
    )  # fmt: skip
    sound = {"input_features": torch.zeros(1, 128, 3000), "labels": _tokens(256)}
    tail = ("model.decoder.embed_tokens", "model.decoder.layer_norm", "proj_out")
    yield Case(
        "Whisper large", lambda: hf.WhisperForConditionalGeneration(whisper), sound, blocks, tail
    )
    bert = hf.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    tail = ("bert.embeddings.word_embeddings", "cls.predictions")
    yield Case(
        "BERT large", lambda: hf.BertForMaskedLM(bert), both, ("bert.encoder.layer.*",), tail
    )
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    }
    words = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    clip = hf.CLIPConfig(
        text_config=words, vision_config={**vision, "patch_size": 14}, projection_dim=768
    )
    pair = {
        "input_ids": _tokens(77),
        "pixel_values": torch.zeros(1, 3, 224, 224),
        "return_loss": True,
    }
    units = (
        "text_model.embeddings.token_embedding",
        "text_model.encoder.layers.*",
        "vision_model.encoder.layers.*",
    )
    yield Case("CLIP L/14", lambda: hf.CLIPModel(clip), pair, units)
    heard = {"input_values": torch.zeros(1, 160_000)}
    speech = hf.Wav2Vec2Config(
        mask_time_prob=0.0,
        layerdrop=0.0,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    yield Case("wav2vec2 large", lambda: hf.Wav2Vec2Model(speech), heard, ("encoder.layers.*",))


def _timm() -> Iterator[Case]:
    import timm

    for name, units in {
        "vit_large_patch16_224": "blocks.*",
        "eva_large_patch14_196": "blocks.*",
        "mixer_l16_224": "blocks.*",
        "convnext_large": "stages.*.blocks.*",
        "swin_large_patch4_window7_224": "layers.*.blocks.*",
        "davit_large": "stages.*.blocks.*",
        "maxvit_large_tf_224": "stages.*.blocks.*",
        "coatnet_3_rw_224": "stages.*.blocks.*",
        "caformer_b36": "stages.*.blocks.*",
        "regnety_320": "s?.b*",
        "resnet152": "layer?.*",
        "densenet201": "features.denseblock?",
        "efficientnet_b7": "blocks.*.*",
        "mobilenetv4_conv_large": "blocks.*.*",
        "nfnet_f3": "stages.*.*",
        "inception_v3": "Mixed_*",
        "vgg16": "features.* pre_logits.fc?",
    }.items():
        size = (
            timm.get_pretrained_cfg(name).input_size
            if timm.is_model_pretrained(name)
            else (3, 224, 224)
        )
        make = lambda name=name: timm.create_model(name)  # noqa: E731
        yield Case(f"timm {name}", make, torch.zeros(8, *size), tuple(units.split()))


def _diffusers() -> Iterator[Case]:
    import diffusers

    resnets, attended = "**.resnets.*", "**.transformer_blocks.*"
    latents, time = torch.zeros(1, 4, 64, 64), torch.ones(1)
    seen = {"sample": latents, "timestep": time, "encoder_hidden_states": torch.zeros(1, 77, 768)}
    yield Case(
        "SD 1.5 UNet",
        lambda: diffusers.UNet2DConditionModel(cross_attention_dim=768),
        seen,
        (resnets, attended),
    )
    yield Case(
        "SDXL UNet",
        lambda: diffusers.UNet2DConditionModel(
            sample_size=128,
            cross_attention_dim=2048,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(320, 640, 1280),
            attention_head_dim=(5, 10, 20),
            transformer_layers_per_block=(1, 2, 10),
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
            use_linear_projection=True,
        ),
        {
            "sample": torch.zeros(1, 4, 128, 128),
            "timestep": time,
            "encoder_hidden_states": torch.zeros(1, 77, 2048),
            "added_cond_kwargs": {
                "text_embeds": torch.zeros(1, 1280),
                "time_ids": torch.zeros(1, 6),
            },
        },
        (resnets, attended),
    )
    steered = {
        **seen,
        "encoder_hidden_states": torch.zeros(1, 77, 1280),
        "controlnet_cond": torch.zeros(1, 3, 512, 512),
    }
    yield Case("ControlNet", lambda: diffusers.ControlNetModel(), steered, (resnets, attended))
    sizes = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
    sides = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    image = torch.zeros(1, 3, 256, 256)
    yield Case(
        "AutoencoderKL",
        lambda: diffusers.AutoencoderKL(**sizes, **sides),
        image,
        (resnets, "**.attentions.*"),
    )
    film = {
        **seen,
        "sample": torch.zeros(1, 4, 8, 32, 32),
        "encoder_hidden_states": torch.zeros(1, 77, 1024),
    }
    video = (resnets, "**.attentions.*", "**.temp_convs.*", "**.temp_attentions.*")
    yield Case("UNet3D", lambda: diffusers.UNet3DConditionModel(), film, video)
    dit = {"hidden_states": torch.zeros(1, 4, 32, 32), "timestep": torch.ones(1, dtype=torch.long)}
    pixart = lambda: diffusers.PixArtTransformer2DModel(caption_channels=4096)  # noqa: E731
    caption = {"encoder_hidden_states": torch.zeros(1, 120, 4096), "added_cond_kwargs": {}}
    hidden = {**dit, "hidden_states": torch.zeros(1, 4, 128, 128), **caption}
    yield Case(
        "PixArt", pixart, {**hidden, "added_cond_kwargs": _no_size()}, ("transformer_blocks.*",)
    )
    sd3 = {
        "encoder_hidden_states": torch.zeros(1, 77, 4096),
        "pooled_projections": torch.zeros(1, 2048),
    }
    sd3 |= {"hidden_states": torch.zeros(1, 16, 64, 64), "timestep": time}
    yield Case("SD 3", lambda: diffusers.SD3Transformer2DModel(), sd3, ("transformer_blocks.*",))
    flux = {
        "hidden_states": torch.zeros(1, 1024, 64),
        "encoder_hidden_states": torch.zeros(1, 256, 4096),
    }
    flux |= {"pooled_projections": torch.zeros(1, 768), "timestep": time, "guidance": time}
    flux |= {"img_ids": torch.zeros(1024, 3), "txt_ids": torch.zeros(256, 3)}
    both = ("transformer_blocks.*", "single_transformer_blocks.*")
    yield Case("Flux", lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True), flux, both)
    wan = {"hidden_states": torch.zeros(1, 16, 5, 32, 32), "timestep": time}
    wan |= {"encoder_hidden_states": torch.zeros(1, 128, 4096)}
    yield Case("Wan 14B", lambda: diffusers.WanTransformer3DModel(), wan, ("blocks.*",))


def _no_size() -> dict[str, torch.Tensor]:
    return {"resolution": torch.zeros(1, 2), "aspect_ratio": torch.zeros(1, 1)}


def _ddpm() -> Iterator[Case]:
    from denoising_diffusion_pytorch import Unet

    noisy = torch.zeros(8, 3, 64, 64), torch.zeros(8)
    units = ("downs.*.0", "downs.*.1", "downs.*.3", "mid_*", "ups.*.0", "ups.*.1", "ups.*.3")
    yield Case("ddpm Unet", lambda: Unet(128), noisy, units)


def _torchvision() -> Iterator[Case]:
    from torchvision import models

    image = torch.zeros(8, 3, 224, 224)
    inception = tuple(
        f"inception{n}" for n in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")
    )
    googlenet = lambda: models.googlenet(init_weights=False, aux_logits=False)  # noqa: E731
    yield Case("googlenet", googlenet, image, inception)
    yield Case("ViT-B/16", models.vit_b_16, image, ("encoder.layers.*",))
    yield Case("Swin3D-B", models.video.swin3d_b, torch.zeros(1, 3, 8, 224, 224), ("features.*.*",))


def _monai() -> Iterator[Case]:
    from monai.networks import nets

    scan = torch.zeros(1, 1, 96, 96, 96)
    units = ("swinViT.layers?.*.blocks.*", "encoder*", "decoder?")
    yield Case("SwinUNETR", lambda: nets.SwinUNETR(1, 14, feature_size=48), scan, units)
    sizes = [3] * 6, [1, 2, 2, 2, 2, 2], [2] * 5
    stages = ("input_block", "downsamples.*", "bottleneck", "upsamples.*")
    yield Case("DynUNet", lambda: nets.DynUNet(3, 1, 14, *sizes), scan, stages)
    stages = ("down_layers.*.*", "up_layers.*.*")
    yield Case("SegResNet", lambda: nets.SegResNet(init_filters=32), scan, stages)
    yield Case(
        "UNETR",
        lambda: nets.UNETR(1, 14, (96, 96, 96)),
        scan,
        ("vit.blocks.*", "encoder?", "decoder?"),
    )


class DLRM(nn.Module):
    """Embedding tables, of which one is most of the model, between two MLPs."""

    def __init__(
        self, rows: tuple[int, ...] = (10_000_000, 1_000_000, 300_000, 10_000, 1000), dim: int = 64
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(number, dim, mode="sum") for number in rows)
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, dim), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(dim * (len(rows) + 1), 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        found = [
            table(column[:, None]) for table, column in zip(self.tables, categories.T, strict=True)
        ]
        return self.top(torch.cat([self.bottom(numbers), *found], -1))


def _recommendation() -> Iterator[Case]:
    batch = torch.zeros(256, 13), torch.zeros(256, 5, dtype=torch.long)
    yield Case("DLRM", DLRM, batch, ("tables.*",))
