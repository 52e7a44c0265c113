"""docs/running.md on two nodes: ``train.sbatch`` with torchrun, and ranks and nodes that are lost on the way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import forks
import nodes
import pytest

pytestmark = pytest.mark.skipif(bool(nodes.missing()), reason=nodes.missing())

PROJECT = Path(__file__).parents[2] / "docs" / "examples" / "project"
SMALL = ["model.dim=32", "model.layers=2", "model.context=32", "train.batch=8", "train.micro_batch=2"]
SMALL += ["train.evaluate_every=5", "train.steps=16", "generate=2"]

# What a cluster has: the job's variables, its nodes by scontrol, and srun, which runs a command on each node.
JOB = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "77"}
JOB |= {"SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "4"}  # one rank: most of the time, interpreters start
JOB |= {"OMP_THREAD_LIMIT": "1", "MKL_NUM_THREADS": "1"}  # as many threads as the script asks for would spin
JOB |= {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}  # options of torchrun: ranks need not import torch
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[0-1]" ] && printf 'node0\\nnode1\\n'
"""
SRUN = """#!/bin/bash
[ "$1 $2" = "--cpus-per-task 4" ] || exit 2
shift 2
for node in {nodes}; do
  nsenter --target=$node --net --uts --pid --mount env --chdir="$PWD" "$@" &
done
wait -n && wait -n
"""


@pytest.fixture
def cluster(tmp_path):
    """Two nodes, and the environment of a job's script."""
    with nodes.two_nodes(tmp_path) as two:
        programs = {"scontrol": SCONTROL, "srun": SRUN.replace("{nodes}", " ".join(str(node.pid) for node in two))}
        (tmp_path / "bin").mkdir()
        for name, text in programs.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield two, {**os.environ, **JOB, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])}


def steps_of(lines):
    """The JSON lines that rank 0 printed."""
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_job_of_slurm_goes_on_after_a_rank_was_killed(cluster, tmp_path):
    two, environment = cluster
    command = ["bash", PROJECT / "train.sbatch", *SMALL, f"out={tmp_path / 'runs'}"]
    lines, killed = [], False
    with subprocess.Popen(command, cwd=PROJECT, env=environment, text=True, stdout=-1, stderr=-2) as job:
        for line in job.stdout:
            lines.append(line)
            if not killed and line.startswith('{"step": 12,'):
                rank = max(two[1].processes("SLURM_JOB_ID=77"))  # torchrun and the rank
                os.kill(rank, signal.SIGKILL)
                killed = True
    output, steps = "".join(lines), steps_of(lines)
    assert job.returncode == 0, output
    numbers = [each["step"] for each in steps]
    restart = next((i for i in range(1, len(numbers)) if numbers[i] <= numbers[i - 1]), 0)
    assert numbers[restart] > 5, output  # it started again, from a checkpoint
    assert numbers == [*range(1, restart + 1), *range(numbers[restart], 17)], output
    resumed = numbers[restart] - 1
    repeated = steps[resumed:restart]
    assert steps[restart:][: len(repeated)] == repeated  # bit for bit
    alone = forks.python(PROJECT / "train.py", PROJECT / "config.yaml", *SMALL, f"out={tmp_path / 'alone'}")
    assert alone.returncode == 0, alone.stderr
    expected = [each["loss"] for each in steps_of(alone.stdout.splitlines())]
    found = [each["loss"] for each in steps[:resumed] + steps[restart:]]
    assert found == pytest.approx(expected, rel=1e-4)  # ranks sum in another order, and rounding grows
    assert found[-1] < found[0] - 1
