"""Facts about the machine, the libraries and the source of a run."""

import re

import torch

from speakerlab.checkpoints import provenance


def test_a_source_without_git_has_an_unknown_commit(monkeypatch, tmp_path):
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", provenance.commit())
    assert provenance.ask_git(tmp_path, "log") == ""  # no repository
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit() == "unknown"


def test_the_facts_of_a_cpu_have_every_key():
    known = provenance.environment(torch.device("cpu"))
    versions = ("torch", "cuda", "cudnn", "driver", "gpu", "capability")
    settings = ("conv_tf32", "matmul_precision", "cudnn_benchmark", "deterministic")
    assert set(known) >= {*versions, *settings}
    assert known["gpu"] is None and known["matmul_precision"] == "highest"


def test_the_version_of_the_driver_is_read(tmp_path):
    assert provenance.driver(tmp_path) is None
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n"
    (folder / "version").write_text(line + "GCC version:  gcc version 12.2.0 (Debian)\n")
    assert provenance.driver(tmp_path) == "550.54.15"
