"""``python -m shardkit env``: facts for a bug report, and nothing private."""

import platform
from types import SimpleNamespace

import pytest
import torch

import shardkit
from shardkit.__main__ import main
from shardkit.testing import env


def facts(capsys) -> dict[str, str]:
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    return {line[:14].strip(): line[15:] for line in lines}


def test_it_prints_what_a_bug_report_needs(monkeypatch, capsys):
    for name, value in {"NCCL_DEBUG": "INFO", "SLURM_JOB_ACCOUNT": "money", "HF_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    assert main(["env"]) == 0
    found = facts(capsys)
    assert found["shardkit"].startswith(f"{shardkit.__version__}, from ")
    assert found["torch"].startswith(f"{torch.__version__}, tested (")
    assert found["python"].startswith(platform.python_version())
    assert "gloo" in found["backends"]
    assert "numpy" in found["packages"]
    assert "NCCL_DEBUG=INFO" in found["variables"]
    assert not {"money", "secret"} & set(found["variables"].replace("=", " ").split())


def test_another_torch_is_said(monkeypatch, capsys):
    monkeypatch.setattr(env, "torch_version", lambda: (2, 99))
    assert main(["env"]) == 0
    assert f"{torch.__version__}, not tested (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        (SimpleNamespace(get_device_name=["H100", "H100", "A40"].__getitem__), "2 x gpu H100, 1 x gpu A40"),
        (SimpleNamespace(), "3 x gpu "),
    ],
)
def test_devices_are_counted_by_name(module, shown, monkeypatch):
    device = SimpleNamespace(type="gpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert env._devices() == shown
