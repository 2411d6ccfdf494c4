"""The regeneration benchmark compares equals: the same arguments for both engines, and totals over rounds."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from benchmarks import regeneration
from benchmarks.regeneration import OfflineEngine, Round, figures
from tasks.server_spec import ServerSpec, serve_command
from tests.stage_room import serving_interpreter


def test_figures_are_of_totals_not_means_of_rounds():
    found = figures([Round(2.0, 100), Round(1.0, 100)], [Round(1.0, 60), Round(3.0, 180)])
    assert found["tokens_per_s_ours"] == pytest.approx(200 / 3, abs=0.01)
    assert found["tokens_per_s_offline"] == 60.0
    assert found["ratio"] == pytest.approx(200 / 180, abs=1e-4)
    assert found["rounds"][0] == {"ours": 50.0, "offline": 60.0, "tokens": [100, 60]}


def test_both_engines_get_the_same_arguments(tmp_path, monkeypatch):
    started = {}

    class Process:
        def __init__(self, command, **_):
            started["command"] = command
            self.stdin, self.stdout = io.StringIO(), io.StringIO('{"ready": true}\n')

    python = serving_interpreter(tmp_path)
    spec = ServerSpec(python, Path("/m"), "bfloat16", 2048, 48, 1.5, "plain", prefix_caching=True)
    served = serve_command(spec, 1)  # asks the interpreter, before processes are fake
    monkeypatch.setattr(regeneration.subprocess, "Popen", Process)
    OfflineEngine(spec, io.StringIO())
    arguments = json.loads(started["command"][-1])
    for option, name in (("--model", "model"), ("--dtype", "dtype")):
        assert served[served.index(option) + 1] == arguments[name]
    for option, name in (
        ("--max-model-len", "max_model_len"), ("--max-num-seqs", "max_num_seqs"),
        ("--kv-cache-memory-bytes", "kv_cache_memory_bytes"),
    ):  # fmt: skip
        assert served[served.index(option) + 1] == str(arguments[name])
    assert ("--enforce-eager" in served) == arguments["enforce_eager"]
    assert ("--enable-prefix-caching" in served) == arguments["enable_prefix_caching"]
