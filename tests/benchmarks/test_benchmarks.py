"""The benchmarks compare equals, count what they say, and report what they measured."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, train_side, train_step
from benchmarks.flops import peak_tflops, step_flops
from benchmarks.sizes import SIZES, at
from benchmarks.synthetic import make_step, reference_loss_of, unfused_loss_of

REPO = Path(__file__).resolve().parents[2]
CPU, TINY = torch.device("cpu"), SIZES["tiny"]
TERMS = {"ce": 0.1, "tv": 0.9}


@pytest.mark.parametrize("vocab", [TINY.draft_vocab_size, TINY.verifier_vocab_size])
def test_data_are_the_verifiers_greedy_answers_and_it_gives_nothing_to_tokens_outside_the_draft_vocabulary(vocab):
    step = make_step(at("tiny", vocab, 48), CPU, torch.float32, TERMS)
    exact = dataclasses.replace(step.verifier, lm_head_VD=step.verifier.lm_head_VD.float())
    p_TV = exact.logits(step.row.last_hidden_TD).softmax(-1)
    assert torch.equal(step.row.input_ids_T[1:], p_TV[:-1].argmax(-1))
    assert p_TV[:, ~step.drafter.t2d].sum(-1).max() < 1e-6
    assert int(step.drafter.t2d.sum()) == vocab


def test_all_blocks_lie_whole_inside_answers_where_all_trainers_agree_what_is_supervised():
    step = make_step(TINY, CPU, torch.float32, TERMS)
    slots = step.drafter.slots(step.row, step.anchors_A)
    assert slots.supervision_mask_AK.all()
    assert step.row.loss_mask_T[slots.state_index_AK].all()
    assert step.anchors_A.shape == (TINY.anchors,)
    assert torch.equal(step.anchors_A, step.anchors_A.unique())


def test_the_readable_losses_are_one_loss():
    step = make_step(TINY, CPU, torch.float32, TERMS).with_normalisers()
    fused = gpu_check.loss_and_gradients(step, gpu_check.fused_loss_of)
    for loss_of in (reference_loss_of, unfused_loss_of):
        check = gpu_check.compare("", 1e-4, fused, gpu_check.loss_and_gradients(step, loss_of))
        assert check.passed, check


def test_steps_of_one_seed_are_equal_and_of_another_differ():
    losses = [
        gpu_check.fused_loss_of(make_step(TINY, CPU, torch.float32, {"ce": 1.0}, seed).with_normalisers()).item()
        for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    # Attention is counted as visible here and as computed there: left out of both.
    size = at("tiny", TINY.verifier_vocab_size, 48)
    step = make_step(size, CPU, torch.float32, TERMS)
    states = step.drafter.slots(step.row, step.anchors_A).state_index_AK.unique().numel()
    with FlopCounterMode(display=False) as counter:
        gpu_check.fused_loss_of(step).backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counts.items() if "attention" not in str(op) and "bmm" not in str(op))
    mean_context = (size.document_tokens // 4 + size.document_tokens) / 2 + size.block_size
    slots = size.anchors * size.block_size
    products += 2 * slots * size.draft_vocab_size * size.markov_rank  # accumulated in place, which torch does not count
    attention = size.num_layers * 3 * 4 * slots * mean_context * size.num_heads * size.head_dim
    assert step_flops(size, states) - attention == pytest.approx(products, rel=0.02)


def test_peaks_are_those_of_the_longest_matching_name():
    assert peak_tflops("NVIDIA H100 NVL") == 835
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops("NVIDIA L40S") == 362
    assert peak_tflops("a GPU of next year") is None


def test_a_failed_check_fails_the_run(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "step_rows", lambda *_: iter(()))
    wrong = gpu_check.compare("x", 1e-3, {"loss": torch.tensor(1.01)}, {"loss": torch.tensor(1.0)})
    monkeypatch.setattr(gpu_check, "checks", lambda _: iter([wrong]))
    assert gpu_check.main(["--device", "cpu", "--small"]) == 1
    assert "FAILED (loss)" in capsys.readouterr().out
    assert gpu_check.compare("x", 1.0, {"loss": torch.ones(1)}, {}).difference == float("inf")


def test_gpu_check_runs_to_the_end_on_a_cpu_and_needs_three_packages(tmp_path):
    """A bare interpreter: no prefect, no pydantic, nothing but what the drafter itself imports."""
    blocked = "prefect", "pydantic", "datasets", "s3fs", "numpy.testing"
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); sys.path.insert(0, {str(REPO)!r})\n"
        "from benchmarks import gpu_check\n"
        f"raise SystemExit(gpu_check.main(['--device', 'cpu', '--small', '--steps', '1', '--json', 'out.json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    names = " ".join(check["name"] for check in result["checks"])
    assert all(word in names for word in ("fused = readable", "bfloat16", "compiled", "sliding", "reduced"))
    assert {(row["vocab"], row["anchors"]) for row in result["steps"]} == {(400, 24), (400, 48), (1000, 24), (1000, 48)}
    assert all(row["tokens_per_s"] > 0 and row["mfu"] is None for row in result["steps"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_gpu_check_refuses_a_machine_without_cuda(capsys):
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def fake_sides(monkeypatch, results):
    """`run_side` gives results[side] in turn, and remembers what it was asked."""
    asked = []

    def run_side(python, side, arguments, vocab, anchors):
        asked.append((side, vocab, anchors))
        return results[side].pop(0)

    monkeypatch.setattr(train_step, "run_side", run_side)
    monkeypatch.setattr(train_step, "peer_python", lambda: Path(sys.executable))
    return asked


def side(seconds, peak, loss=1.0):
    return {"seconds": seconds, "peak_bytes": peak, "loss": loss}


def test_a_row_compares_medians_and_largest_peaks_of_interleaved_rounds(monkeypatch, tmp_path, capsys):
    asked = fake_sides(
        monkeypatch,
        {
            "ours": [side([1.0, 2.0], 100), side([2.0], 120)],
            "speculators": [side([6.0], 300, 0.75), side([4.0, 8.0], 240, 0.75)],
            "normalisers": [{"seconds": [2.0]}],
        },
    )
    out = tmp_path / "r.json"
    arguments = ["--vocab", "32000", "--anchors", "256", "--rounds", "2", "--json", str(out)]
    assert train_step.main(arguments) == 0
    assert [name for name, *_ in asked] == ["ours", "speculators"] * 2 + ["normalisers"]
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert (row["vocab"], row["anchors"]) == (32000, 256)
    assert (row["tokens_per_s_ours"], row["tokens_per_s_speculators"]) == (4096 / 2, 4096 / 6)
    assert (row["peak_bytes_ours"], row["peak_bytes_speculators"]) == (120, 300)
    assert (row["speed_ratio"], row["memory_ratio"], row["loss_difference"]) == (3.0, 2.5, 0.25)
    assert result["normalisers"]["tokens_per_s"] == 2048
    assert re.search(r"\| 32,000 \| 256 \| 2,048 \| 683 \| 3\.00x \|", capsys.readouterr().out)


def test_a_peer_without_memory_is_measured_at_the_largest_size_that_fits_and_the_row_says_so(monkeypatch, tmp_path):
    asked = fake_sides(
        monkeypatch,
        {
            "ours": [side([1.0], 100), side([1.0], 100)],
            "speculators": [{"out_of_memory": True}, {"out_of_memory": True}, side([4.0], 400), side([4.0], 400)],
        },
    )
    out = tmp_path / "r.json"
    assert train_step.main(["--vocab", "151936", "--anchors", "256", "--json", str(out)]) == 0
    assert [anchors for name, _, anchors in asked if name == "speculators"] == [256, 128, 64, 64]
    (row,) = json.loads(out.read_text())["rows"]
    assert row["anchors"] == 256
    assert "out of memory at 256 anchors and was measured with 64" in row["note"]


def test_a_second_round_is_left_out_where_it_would_end_after_the_budget(monkeypatch, tmp_path):
    asked = fake_sides(monkeypatch, {"ours": [side([1.0], 100)] * 4, "speculators": [side([4.0], 400)] * 4})
    out = tmp_path / "r.json"
    arguments = ["--vocab", "151936", "--json", str(out), "--rounds", "2"]
    assert train_step.main([*arguments, "--budget-minutes", "0"]) == 0
    assert len(asked) == 4, "each size once, whatever the budget"
    assert [row["rounds"] for row in json.loads(out.read_text())["rows"]] == [1, 1]


def test_our_side_is_measured_in_a_process_of_its_own(capsys):
    arguments = ["--size", "tiny", "--only", "ours", "--rounds", "1", "--vocab", "400", "--min-seconds", "0"]
    assert train_step.main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\| 400 \| 48 \| [\d,]+ \| - \| - \| 0\.\d+ \|", printed)
    assert "normalisers" in printed


def test_a_side_out_of_memory_says_so_and_other_faults_are_shown(monkeypatch, capsys):
    def too_large(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(train_side, "measure", too_large)
    arguments = ["ours", "--size", "tiny", "--vocab", "400", "--anchors", "8"]
    assert train_side.main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == {"out_of_memory": True}

    def broken(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(train_side, "measure", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        train_side.main(arguments)


def test_a_peer_that_cannot_be_had_is_an_error_with_the_remedy(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(train_step, "PEER_PYTHON", tmp_path / "none")
    monkeypatch.setattr(train_step.importlib.util, "find_spec", lambda _: None)
    failed = subprocess.CompletedProcess([], 2)
    monkeypatch.setattr(train_step.subprocess, "run", lambda *_, **__: failed)
    assert train_step.main(["--size", "tiny"]) == 1
    assert "make peer-env" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["train_step.py", "gpu_check.py"])
def test_help_gives_examples(script):
    command = [sys.executable, str(REPO / "benchmarks" / script), "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert f"python benchmarks/{script}" in answer.stdout
