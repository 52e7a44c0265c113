"""``python -m shardkit env``: facts for a bug report, and nothing private."""

import numpy
import torch

import shardkit
from shardkit.__main__ import main
from shardkit.testing import env


def test_it_prints_what_a_bug_report_needs_and_nothing_private(monkeypatch, capsys):
    for name, value in {
        "NCCL_DEBUG": "INFO",
        "SLURM_JOB_ACCOUNT": "money",
        "HF_TOKEN": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(env, "get_pretty_env_info", lambda: "torch's own")
    for version, tested in ((env.torch_version(), "tested"), ((2, 99), "not tested")):
        monkeypatch.setattr(env, "torch_version", lambda version=version: version)
        assert main(["env"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"shardkit {shardkit.__version__}, from ")
        assert f"torch {torch.__version__}, {tested} (" in shown
        assert f"numpy {numpy.__version__}" in shown
        assert "NCCL_DEBUG=INFO" in shown
        assert shown.endswith("torch's own\n")
        assert "money" not in shown
        assert "secret" not in shown
