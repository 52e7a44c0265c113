"""Two nodes of two ranks: real networks between them, names, a shared disk, and nodes that are
lost.

Nodes are network, host name, process and mount namespaces (``tests/helpers/nodes.py``), so this
needs Linux and root.
"""

import json
import re
import time
from pathlib import Path

import forks
import node_programs
import nodes
import pytest
import torch

pytestmark = pytest.mark.skipif(bool(nodes.missing()), reason=nodes.missing())

HELPERS = Path(nodes.__file__).parent
PROGRAMS, IN_NODE = HELPERS / "node_programs.py", HELPERS / "in_node.py"
# seconds in which ranks end that have lost the others; a limit of 4 s, on a busy machine
BOUND = 30.0


class Rank:
    """A rank of a program, in a process on a node, with the variables of torchrun."""

    def __init__(
        self, folder: Path, node: nodes.Node, rank: int, world: int, *words: str | Path
    ) -> None:
        self.node, self.folder = node, folder / f"rank{rank}"
        self.folder.mkdir()
        places = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": 2}
        places |= {"MASTER_ADDR": "node0", "MASTER_PORT": 29500}
        variables = [f"{name}={value}" for name, value in places.items()]
        self.process = forks.start(
            self.folder, IN_NODE, str(node.pid), *variables, PROGRAMS, *words
        )

    def end(self, seconds: float) -> int | None:
        """Wait for the end, and return the exit code; None if it does not come."""
        self.process.join(seconds)
        return self.process.exitcode

    @property
    def output(self) -> str:
        return "".join((self.folder / name).read_text() for name in ("stdout", "stderr"))


@pytest.fixture
def two(tmp_path):
    with nodes.two_nodes(tmp_path) as pair:
        yield pair


def start(folder, on, program, *words):
    """Start two ranks of a program on each node."""
    folder.mkdir()
    world = 2 * len(on)
    return [Rank(folder, on[rank // 2], rank, world, program, *words) for rank in range(world)]


def run(folder, on, program, *words):
    ranks = start(folder, on, program, *words)
    assert [rank.end(120.0) for rank in ranks] == [0] * len(ranks), "\n".join(
        rank.output for rank in ranks
    )


def test_what_two_nodes_train_is_right_and_one_node_resumes_it(two, tmp_path):
    for kind in node_programs.KINDS:
        (tmp_path / kind).mkdir()
    run(tmp_path / "train", two, "train", tmp_path)
    run(tmp_path / "resume", two[:1], "resume", tmp_path)
    alone = node_programs.build()
    expected = [node_programs.step(alone, number) for number in range(2 * node_programs.STEPS)]
    assert expected[0] != pytest.approx(expected[3], rel=1e-2)
    for kind in node_programs.KINDS:
        losses, differ = json.loads((tmp_path / kind / "losses").read_text())
        assert differ is None
        later = json.loads((tmp_path / kind / "later").read_text())
        assert losses + later == pytest.approx(expected, rel=1e-5)  # ranks sum in another order
        saved, resumed = (torch.load(tmp_path / kind / name) for name in ("state", "resumed"))
        assert saved.keys() == resumed.keys()
        assert sum("exp_avg" in name for name in saved) == 12
        assert all(torch.equal(saved[name], resumed[name]) for name in saved)


# A line of the report, which the watch logs; it is raised where gloo's connections broke first.
LINE = r".*\n(\[rank\d\]: )?- "
LOST = {
    1: rf"watch: ranks? (2-3|[23]) silent for \d+ s[.;] {LINE}ranks? 0[^\n]*node_programs\.py:",
    0: r"watch: the (process that holds the )?store of the process group (has ended|does not answer)",
}


@pytest.mark.parametrize("lost", LOST)
def test_watched_ranks_end_when_the_other_node_is_lost(lost, two, tmp_path):
    ranks = start(tmp_path / "ranks", two, "endless", tmp_path)
    until(lambda: len(list(tmp_path.glob("is training *"))) == len(ranks), ranks)
    two[lost].lose()
    began = time.monotonic()
    others = [rank for rank in ranks if rank.node is not two[lost]]
    assert [rank.end(BOUND + began - time.monotonic()) for rank in others] == [1, 1]
    for rank in others:
        assert re.search(LOST[lost], rank.output, re.DOTALL), rank.output


def until(condition, ranks):
    limit = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < limit, "\n".join(rank.output for rank in ranks)
        time.sleep(0.02)
