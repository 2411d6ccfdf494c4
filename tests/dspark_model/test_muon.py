"""Muon in full precision, against its polynomial on singular values and against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch

from dspark_model.muon import FullPrecisionMuon, orthogonalise

COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_only_singular_values_change_and_as_the_polynomial_says(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    expected = (left * values) @ right
    torch.testing.assert_close(orthogonalise(matrix, COEFFICIENTS, 5, 1e-7).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_steps_are_those_of_torch_up_to_its_rounding(shape):
    generator = torch.Generator().manual_seed(0)
    options = {"lr": 0.1, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
    ours = torch.nn.Parameter(torch.randn(shape, generator=generator))
    theirs, start = copy.deepcopy(ours), ours.detach().clone()
    optimizers = FullPrecisionMuon([ours], **options), torch.optim.Muon([theirs], **options)
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    assert (ours - start).norm() > 0.5 * moved
    momenta = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (ours, theirs), strict=True)]
    torch.testing.assert_close(*momenta)


def test_parameters_without_gradient_stay_and_closures_are_refused():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = FullPrecisionMuon([parameter], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2, 3))
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
