"""TRL's SFTTrainer, unchanged, with rows of different lengths: docs/integrations.md's function
against one process.
"""

import os
from unittest import mock

import pytest
import torch
from cpu_ranks import on_ranks
from other_trainers import assert_same, full, of_the_page, packages, tiny, torchrun

packages("trl.trainer.sft_trainer", "transformers.models.llama.modeling_llama", "datasets")


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1, "<pad>": 2} | {f"w{number}": number for number in range(3, 64)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    )


def texts():
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (16,), generator=generator).tolist()
    lines = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list(
        [{"text": " ".join(f"w{number}" for number in line)} for line in lines]
    )


@on_ranks(2, timeout=120)
def test_sft(tmp_path):
    train, folder = of_the_page("with_trl"), str(tmp_path)
    with torchrun():
        trainer = train(model := tiny(), texts(), tokenizer(), folder)
        train(resumed := tiny(), texts(), tokenizer(), folder, resume=f"{folder}/checkpoint-2")
        assert_same(full(resumed), full(model))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(alone(folder), abs=4e-3)  # bf16: 8 bits


def alone(folder):
    """The losses of the same trainer without sharding, of the same global batches,
    in this process.
    """
    from trl import SFTConfig, SFTTrainer

    options = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
    }
    options |= {"save_strategy": "no"}
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "1", "LOCAL_RANK": "-1"}):
        args = SFTConfig(
            folder, **options, max_length=16, use_cpu=True, report_to=[], disable_tqdm=True
        )
        assert args.world_size == 1
        trainer = SFTTrainer(tiny(), args, train_dataset=texts(), processing_class=tokenizer())
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
