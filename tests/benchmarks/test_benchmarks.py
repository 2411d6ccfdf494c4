"""The benchmarks compare equals: what is timed as fused and as reference is one loss with one gradient."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, train_step
from benchmarks.synthetic import fused_step_loss, make_step

REPO = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize("terms", [{"ce": 1.0}, {"ce": 0.1, "tv": 0.9}, {"kl": 1.0}])
def test_fused_and_reference_steps_agree_in_loss_and_gradient(terms):
    step = make_step(gpu_check.TINY, CPU, torch.float32)
    fused, _ = fused_step_loss(step, terms, torch.float32)
    fused.backward()
    gradients = {name: value.grad.clone() for name, value in step.drafter.trainable_state().items()}
    step.drafter.zero_grad()
    reference = train_step.reference_step_loss(step, terms, torch.float32)
    reference.backward()
    torch.testing.assert_close(fused, reference)
    for name, value in step.drafter.trainable_state().items():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_steps_of_one_seed_are_equal_and_of_another_differ():
    losses = [fused_step_loss(make_step(gpu_check.TINY, CPU, torch.float32, seed), {"ce": 1.0}, torch.float32)[0].item()
              for seed in (0, 0, 1)]  # fmt: skip
    assert losses[0] == losses[1] != losses[2]


def test_train_step_measures_each_variant_in_a_process_and_prints_ratios(tmp_path, monkeypatch, capsys):
    tiny = {"toy": (gpu_check.TINY, {"ce": 1.0})}
    monkeypatch.setattr(train_step, "SIZES", tiny)
    toy = tmp_path / "toy.py"  # a child process knows nothing of the patch: give it a script that has it
    toy.write_text(
        f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
        "from benchmarks import gpu_check, train_step\n"
        "train_step.SIZES = {'toy': (gpu_check.TINY, {'ce': 1.0})}\n"
        "raise SystemExit(train_step.main())\n"
    )
    monkeypatch.setattr(train_step, "__file__", str(toy))
    out = tmp_path / "result.json"
    assert train_step.main(["--dtype", "float32", "--steps", "1", "--rounds", "1", "--json", str(out)]) == 0
    (result,) = json.loads(out.read_text())
    assert result["fused"]["loss"] == pytest.approx(result["reference"]["loss"], rel=1e-5)
    assert result["speedup"] == pytest.approx(result["reference"]["seconds"] / result["fused"]["seconds"])
    assert "| toy | 1 ce |" in capsys.readouterr().out


def test_gpu_check_computes_on_any_device_what_it_checks_on_cuda():
    parity = gpu_check.check_parity(CPU)
    assert {"hidden", "loss", "grad fc.weight", "grad markov_head.markov_w2.weight"} <= parity.keys()
    assert max(parity.values()) == 0
    step = gpu_check.measure_step(dataclasses.replace(gpu_check.TINY, tokens=128), CPU, steps=1)
    assert step["slots"] == gpu_check.TINY.anchors * gpu_check.TINY.block_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_gpu_check_refuses_a_machine_without_cuda(capsys):
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["train_step.py", "gpu_check.py"])
def test_help_gives_examples(script):
    command = [sys.executable, str(REPO / "benchmarks" / script), "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert f"python benchmarks/{script}" in answer.stdout
