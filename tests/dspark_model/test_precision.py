"""Products run in bfloat16 only where a device has instructions for them."""

from __future__ import annotations

import pytest
import torch

from dspark_model.precision import compute_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def machine(monkeypatch):
    def with_instructions(cpu=(), cuda=False):
        known = dict.fromkeys(("avx2", "avx512_f", "avx512_bf16", "amx_bf16"), False)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**known, **dict.fromkeys(cpu, True)})
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: cuda)

    return with_instructions


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ((), torch.float32),
        (("avx2", "avx512_f"), torch.float32),
        (("avx512_f", "avx512_bf16"), torch.bfloat16),
        (("amx_bf16",), torch.bfloat16),
        (("bf16",), torch.bfloat16),
    ],
)
def test_auto_is_bfloat16_on_cpus_that_multiply_it(machine, instructions, expected):
    machine(cpu=instructions)
    assert compute_dtype("auto", CPU) == expected


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_bfloat16_on_gpus_that_multiply_it(machine, native):
    machine(cpu=() if native else ("avx512_bf16",), cuda=native)
    assert compute_dtype("auto", CUDA) == (torch.bfloat16 if native else torch.float32)


def test_a_choice_is_kept(machine):
    machine()
    assert compute_dtype("bfloat16", CPU) == torch.bfloat16
    machine(cpu=("amx_bf16",))
    assert compute_dtype("float32", CPU) == torch.float32
