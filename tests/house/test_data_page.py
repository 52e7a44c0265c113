"""docs/data-and-logging.md: no sample is lost or repeated by a resume on another number of ranks."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

PAGE = Path(__file__).parents[2] / "docs" / "data-and-logging.md"


def test_an_epoch_that_other_ranks_finish_has_each_sample_once(monkeypatch):
    code = re.search(r"^def samples_from.*?(?=^\S(?!ef))", PAGE.read_text(), re.M | re.S)[0]
    exec(code, page := {"torch": torch, "dist": dist})
    position, batch, seen = 0, 3, []
    for ranks, steps in ((4, 3), (2, 5), (6, 3)):  # 36, 30 and 54 samples
        monkeypatch.setattr(dist, "get_world_size", lambda ranks=ranks: ranks)
        for rank in range(ranks):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            seen += page["samples_from"](position, 120, epoch=1)[: steps * batch]
        position += steps * batch * ranks
    assert sorted(seen) == list(range(position)) == list(range(120))
