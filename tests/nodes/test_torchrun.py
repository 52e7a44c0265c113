"""docs/running.md on two nodes: ``train.sbatch`` with torchrun, and ranks and nodes that are lost
on the way.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import forks
import nodes
import pytest
import torch.distributed.run

pytestmark = pytest.mark.skipif(bool(nodes.missing()), reason=nodes.missing())

IN_NODE = Path(nodes.__file__).parent / "in_node.py"
PROJECT = Path(__file__).parents[2] / "docs" / "examples" / "project"
SMALL = [
    "model.dim=32",
    "model.layers=2",
    "model.context=32",
    "train.batch=8",
    "train.micro_batch=2",
]
SMALL += ["train.evaluate_every=5", "train.steps=16", "generate=2"]

# What a cluster has: the job's variables, its nodes by scontrol, and srun, which runs torchrun on
# each node: here the test does, in forks, for interpreters that import torch took most of the time.
JOB = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "77"}
JOB |= {"SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "4"}
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[0-1]" ] && printf 'node0\\nnode1\\n'
"""
SRUN = """#!/bin/bash
[ "$1 $2 $3" = "--cpus-per-task 4 torchrun" ] || exit 2
echo TORCH_DISABLE_SHARE_RDZV_TCP_STORE=$TORCH_DISABLE_SHARE_RDZV_TCP_STORE "${@:4}" && exec cat "$SAID"
"""
TORCHRUN = [torch.distributed.run.__file__, "--run-path", "--start-method=fork"]


@pytest.fixture
def environment(tmp_path):
    """Of the job's script, which says what the pipe ``said`` has."""
    os.mkfifo(tmp_path / "said")
    (tmp_path / "bin").mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        **os.environ,
        **JOB,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SAID": f"{tmp_path / 'said'}",
    }


def start_torchrun(node, folder, variable, *words):
    """Start it on a node, as a process that says what it does to the job."""
    (folder / node.name).mkdir()
    for name in ("stdout", "stderr"):
        (folder / node.name / name).symlink_to(folder / "said")
    return forks.start(
        folder / node.name, IN_NODE, str(node.pid), variable, *TORCHRUN, *words, cwd=PROJECT
    )


def last_child(pid):
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[-1])


def steps_of(lines):
    """The JSON lines that rank 0 printed."""
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_job_of_slurm_goes_on_after_a_rank_was_killed(environment, tmp_path):
    command = ["bash", PROJECT / "train.sbatch", *SMALL, f"out={tmp_path / 'runs'}"]
    lines, agents, killed = [], [], False
    with (
        nodes.two_nodes(tmp_path) as two,
        subprocess.Popen(
            command, cwd=PROJECT, env=environment, text=True, stdout=-1, stderr=-2
        ) as job,
    ):
        for line in job.stdout:
            lines.append(line)
            if line.startswith("TORCH_DISABLE_"):
                agents = [start_torchrun(node, tmp_path, *line.split()) for node in two]
            if not killed and line.startswith('{"step": 12,'):
                # a child of torchrun in the node
                os.kill(last_child(last_child(agents[1].pid)), signal.SIGKILL)
                killed = True
        for agent in agents:
            agent.join()
    output, steps = "".join(lines), steps_of(lines)
    assert [agent.exitcode for agent in agents] == [0, 0], output
    numbers = [each["step"] for each in steps]
    restart = next((i for i in range(1, len(numbers)) if numbers[i] <= numbers[i - 1]), 0)
    assert numbers[restart] > 5, output  # it started again, from a checkpoint
    assert numbers == [*range(1, restart + 1), *range(numbers[restart], 17)], output
    resumed = numbers[restart] - 1
    repeated = steps[resumed:restart]
    assert steps[restart:][: len(repeated)] == repeated  # bit for bit
    alone = forks.python(
        PROJECT / "train.py", PROJECT / "config.yaml", *SMALL, f"out={tmp_path / 'alone'}"
    )
    assert alone.returncode == 0, alone.stderr
    expected = [each["loss"] for each in steps_of(alone.stdout.splitlines())]
    found = [each["loss"] for each in steps[:resumed] + steps[restart:]]
    # ranks sum in another order, and rounding grows
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0] - 1
