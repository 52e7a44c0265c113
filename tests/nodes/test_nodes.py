"""Two nodes of two ranks, and one that is lost: the ranks of the other end, with a report.

Nodes are network, host name, process and mount namespaces (``tests/helpers/nodes.py``), so this
needs Linux and root.
"""

import re
import time
from pathlib import Path

import forks
import nodes
import pytest

pytestmark = pytest.mark.skipif(bool(nodes.missing()), reason=nodes.missing())

HELPERS = Path(nodes.__file__).parent
PROGRAM, IN_NODE = HELPERS / "node_programs.py", HELPERS / "in_node.py"
# seconds in which ranks end that have lost the others; a limit of 4 s, on a busy machine
BOUND = 30.0


class Rank:
    """A rank of the program, in a process on a node, with the variables of torchrun."""

    def __init__(self, folder, node, rank):
        self.node, self.folder = node, folder / f"rank{rank}"
        self.folder.mkdir()
        places = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
        places |= {"MASTER_ADDR": "node0", "MASTER_PORT": 29500}
        variables = [f"{name}={value}" for name, value in places.items()]
        self.process = forks.start(self.folder, IN_NODE, str(node.pid), *variables, PROGRAM, folder)

    def end(self, seconds):
        """Wait for the end, and return the exit code; None if it does not come."""
        self.process.join(seconds)
        return self.process.exitcode

    @property
    def output(self):
        return "".join((self.folder / name).read_text() for name in ("stdout", "stderr"))


# A line of the report, which the watch logs; it is raised where gloo's connections broke first.
LINE = r".*\n(\[rank\d\]: )?- "
LOST = {
    1: rf"watch: ranks? (2-3|[23]) silent for \d+ s[.;] {LINE}ranks? 0[^\n]*node_programs\.py:",
    0: r"watch: the (process that holds the )?store of the process group (has ended|does not answer)",
}


@pytest.mark.parametrize("lost", LOST)
def test_watched_ranks_end_when_the_other_node_is_lost(lost, tmp_path):
    with nodes.two_nodes(tmp_path) as two:
        ranks = [Rank(tmp_path, two[rank // 2], rank) for rank in range(4)]
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
