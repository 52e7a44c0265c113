"""Tiny random transformers models: real modeling code, weights of a few thousand elements, no
dropout.
"""

import torch
import transformers as tf
from zoo_entry import Entry, floats, integers

# it recommends kernels and masks, not what a test of tiny models needs
tf.logging.set_verbosity_error()

VOCAB, LENGTH, BATCH = 67, 6, 2
IMAGE = {"image_size": 16, "patch_size": 4, "num_channels": 3}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GQA = {**SIZES, "num_key_value_heads": 1}
MOE = {**GQA, "intermediate_size": 24}  # grouped matmuls take strides of whole 16 bytes
ENCODER_DECODER = {"d_model": 16} | {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 20))
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


HEADS = []


def import_models():
    """Import the models of all entries, which each process does otherwise when it
    first builds one.
    """
    for name in HEADS:
        getattr(tf, name)


def _loss(model, batch):
    return model(**batch).loss


def _entry(
    head,
    batch,
    crossing=False,
    **arguments,
):
    """``head`` with these arguments of its config; by name, since transformers imports a model when
    it is asked for.
    """
    HEADS.append(head)

    def build():
        kind = getattr(tf, head)
        return kind(kind.config_class(**arguments)).train()

    return Entry(build, batch, _loss, crossing=crossing)


def _tokens(seed):
    ids = integers(seed, VOCAB, BATCH, LENGTH)
    return {"input_ids": ids, "labels": ids}


def _pairs(seed):
    return {
        "input_ids": integers(seed, VOCAB, BATCH, LENGTH),
        "labels": integers(seed + 1000, VOCAB, BATCH, LENGTH - 1),
    }


def _images(seed):
    return {"pixel_values": floats(seed, BATCH, 3, 16, 16), "labels": integers(seed, 2, BATCH)}


def _mel(seed):
    return {
        "input_features": floats(seed, BATCH, 8, 24),
        "labels": integers(seed, VOCAB, BATCH, LENGTH),
    }


def _waves(seed):
    return {"input_values": floats(seed, BATCH, 400), "labels": integers(seed, 9, BATCH, 3) + 1}


def _image_text(seed):
    # CLIP reads a text's features at its end token, the largest id.
    ids = torch.cat(
        [integers(seed, VOCAB - 1, BATCH, LENGTH - 1), torch.full((BATCH, 1), VOCAB - 1)], 1
    )
    return {"input_ids": ids, "pixel_values": floats(seed, BATCH, 3, 16, 16), "return_loss": True}


TRANSFORMERS = {
    "llama": _entry("LlamaForCausalLM", _tokens, **GQA),
    "gemma2": _entry("Gemma2ForCausalLM", _tokens, **GQA, head_dim=8),
    "gpt2": _entry("GPT2LMHeadModel", _tokens, vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=2, n_positions=32,
        bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "qwen3_moe": _entry("Qwen3MoeForCausalLM", _tokens, **GQA, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, output_router_logits=True),
    "mixtral": _entry("MixtralForCausalLM", _tokens, **MOE, num_local_experts=3),
    "mamba": _entry("MambaForCausalLM", _tokens, vocab_size=VOCAB, hidden_size=16, state_size=4,
        num_hidden_layers=2, time_step_rank=2),
    "jamba": _entry("JambaForCausalLM", _tokens, **{**MOE, "num_hidden_layers": 4}, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2, num_experts_per_tok=1,
        mamba_d_state=4, mamba_dt_rank=2),
    "t5": _entry("T5ForConditionalGeneration", _pairs, crossing=True, vocab_size=VOCAB, d_model=16, d_kv=8,
        d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0),
    "bert": _entry("BertForMaskedLM", _tokens, **SIZES, **NO_DROPOUT),
    "albert": _entry("AlbertForMaskedLM", _tokens, **SIZES, embedding_size=8, **NO_DROPOUT,
        classifier_dropout_prob=0.0),
    "deberta": _entry("DebertaV2ForMaskedLM", _tokens, **SIZES, **NO_DROPOUT, relative_attention=True,
        pos_att_type=["p2c", "c2p"], max_relative_positions=8),
    "vit": _entry("ViTForImageClassification", _images, **SIZES, **NO_DROPOUT, **IMAGE),
    "swin": _entry("SwinForImageClassification", _images, image_size=16, patch_size=2, embed_dim=8, depths=[2, 2],
        num_heads=[1, 2], window_size=2, drop_path_rate=0.0),
    "whisper": _entry("WhisperForConditionalGeneration", _mel, crossing=True, vocab_size=VOCAB, num_mel_bins=8,
        **ENCODER_DECODER, max_source_positions=12, max_target_positions=16, dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    "wav2vec2": _entry("Wav2Vec2ForCTC", _waves, vocab_size=12, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=20, conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 4),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, activation_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
        ctc_loss_reduction="mean", pad_token_id=0),
    "clip": _entry("CLIPModel", _image_text, text_config={**SIZES, "eos_token_id": VOCAB - 1, "bos_token_id": 1},
        vision_config={**SIZES, **IMAGE}, projection_dim=8),
}  # fmt: skip
