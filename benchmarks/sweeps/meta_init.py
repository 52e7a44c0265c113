"""Meta init against ordinary construction, on every causal LM of transformers and a choice of other
models.

Some minutes: ``PYTHONPATH=.:tests/helpers python benchmarks/sweeps/meta_init.py [name ...]``. CI
runs a part, in ``tests/meta/test_meta_zoo.py``.
"""

from __future__ import annotations

import sys
import tempfile

import torch.distributed as dist
from meta_check import check_same_as_ordinary
from tiny_transformers import builder
from verdicts import causal_lms, sweep

OTHERS = (
    "BertModel", "BertForMaskedLM", "T5ForConditionalGeneration", "WhisperForConditionalGeneration", "ViTModel",
    "ViTForImageClassification", "CLIPModel", "SwinModel", "BeitModel", "DeiTModel", "Dinov2Model", "ResNetModel",
    "ConvNextModel", "Wav2Vec2Model", "HubertModel", "BartModel", "DistilBertModel", "RobertaModel", "DebertaV2Model",
    "ElectraModel", "AlbertModel", "ModernBertModel", "ModernBertForMaskedLM", "LongformerModel", "SiglipModel",
    "SegformerModel", "DetrModel", "MBartModel", "PegasusModel", "LongT5Model", "UMT5Model", "FunnelModel",
    "PerceiverModel", "VideoMAEModel", "ViTMAEModel", "ASTModel", "SamModel", "BlipModel", "FlavaModel", "LlavaModel",
)  # fmt: skip


def built_alike(name: str) -> tuple[str, str]:
    try:
        build = builder(name)
        build()
    except Exception as error:
        return "not built", f"{type(error).__name__}: {str(error)[:120]}"
    try:
        check_same_as_ordinary(build)
    except Exception as error:
        return "different", f"{type(error).__name__}: {str(error)[:600]}"
    return "equal", ""


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    sweep(sys.argv[1:] or [*causal_lms(), *OTHERS], built_alike)
