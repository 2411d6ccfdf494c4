"""Training learns, and refuses what it cannot learn from."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from dspark_model.batch import pack
from dspark_model.config import ConfigError
from dspark_model.metrics import total, walk_documents
from dspark_model.train_config import TrainConfig
from dspark_model.trainer import HISTORY, Trainer
from tests.dspark_model.training_run import (
    ANSWER,
    DOCUMENTS,
    MASK,
    PROMPT,
    VOCAB,
    architecture,
    differing,
    run_config,
    weights,
)


def history(config: TrainConfig) -> list[dict]:
    return [json.loads(line) for line in (config.output / HISTORY).read_text().splitlines()]


CASES = {
    "dspark": {},
    "dflash layout": {"sample_from_anchor": False},
    "sliding": {"layer_kinds": ("sliding",)},
    "no heads": {"markov_rank": 0, "confidence_head": False},
}


@pytest.mark.parametrize("choices", CASES.values(), ids=CASES.keys())
def test_a_handful_of_answers_is_learnt_by_heart(data, tmp_path, choices):
    drafter = architecture(**choices)
    config = run_config(
        data, tmp_path, drafter=drafter, steps=120, learning_rate=0.01, validate_every=40,
        num_speculative_tokens=drafter.proposals_per_block,
    )  # fmt: skip
    trainer = Trainer(config)
    before = total(walk_documents(trainer.drafter, trainer.validation_documents), drafter.proposals_per_block)
    assert trainer.run()
    losses = [entry["loss"] for entry in history(config) if "loss" in entry]
    assert len(losses) == 120
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert trainer.best > max(1.5, before.acceptance_length + 0.5)
    best = total(walk_documents(trainer.load_best(), trainer.validation_documents), drafter.proposals_per_block)
    assert best.acceptance_length == trainer.best


@pytest.mark.parametrize(("optimizer", "loss"), [("muon", {"ce": 1.0}), ("adamw", {"kl": 1.0})])
def test_each_optimiser_and_loss_lowers_the_loss(data, tmp_path, optimizer, loss):
    trainer = Trainer(
        run_config(data, tmp_path, steps=40, validate_every=40, learning_rate=0.01, optimizer=optimizer, loss=loss)
    )
    trainer.run()
    losses = [entry["loss"] for entry in trainer.history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]


def test_low_precision_and_a_reduced_vocabulary_train_too(data, tmp_path):
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[data.ids.flatten().unique()] = True
    save_file({"t2d": t2d}, tmp_path / "vocab.safetensors")
    drafter = architecture(draft_vocab_size=int(t2d.sum()))
    config = run_config(
        data, tmp_path, drafter=drafter, vocab=tmp_path / "vocab.safetensors", dtype="bfloat16", steps=25
    )
    trainer = Trainer(config)
    trainer.run()
    losses = [entry["loss"] for entry in trainer.history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert all(value.dtype == torch.float32 for value in weights(trainer).values()), "masters stay in full"


def test_a_row_without_supervised_slots_changes_nothing(data, tmp_path):
    examples = data.write("unsupervised", [data.mask, [0] * (PROMPT + ANSWER)])
    trainer = Trainer(run_config(data, tmp_path, examples=examples, tokens_per_step=PROMPT + ANSWER))
    trainer.step = next(step for step in range(2) if trainer.sampler.row(step) == [1])
    before = weights(trainer)
    result = trainer.train_step()
    assert (result.supervised_slots, result.anchors, result.loss) == (0, 0, 0.0)
    assert not differing(before, weights(trainer))
    assert not any(optimizer.state for optimizer in trainer.optimizers)
    trainer.step = 1 - trainer.step
    assert trainer.train_step().supervised_slots > 0
    assert differing(before, weights(trainer))


def test_the_confidence_head_learns_in_every_step_however_few_its_slots(data, tmp_path):
    """Only ce in the loss: a sample of blocks is judged; a row of few anchors must not come away empty."""
    trainer = Trainer(run_config(data, tmp_path, loss={"ce": 1.0}, confidence_slots=1, anchors_per_step=3))
    for trainer.step in range(8):
        assert trainer.train_step().confidence_loss > 0


def test_a_detached_confidence_head_leaves_the_backbone_alone(data, tmp_path):
    gradients = []
    for weight in (0.0, 1.0):
        trainer = Trainer(
            run_config(data, tmp_path / str(weight), detach_confidence=True, confidence_loss_weight=weight)
        )
        row, anchors = pack([trainer.train_documents[0]]), torch.tensor([6, 9])
        found = trainer.criterion(row, anchors)
        (found.loss + weight * found.confidence).backward()
        gradients.append({n: p.grad for n, p in trainer.drafter.trainable_state().items() if "confidence" not in n})
    assert not differing(*gradients)


def test_history_holds_counts_of_every_step(data, tmp_path):
    config = run_config(data, tmp_path, steps=6, validate_every=4)
    Trainer(config).run()
    steps = [entry for entry in history(config) if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4, 5, 6]
    assert {entry["anchors"] for entry in steps} == {24}
    assert {entry["anchor_candidates"] for entry in steps} == {2 * ANSWER}
    assert all(entry["metrics"]["draft_vocab_coverage"] > 0 for entry in steps)
    validations = [entry for entry in history(config) if "drafts" in entry]
    assert [entry["step"] for entry in validations] == [4, 6]
    for entry in validations:
        assert entry["walked_acceptance_length"] == pytest.approx(1 + sum(entry["survival"]))


def test_the_best_weights_are_those_of_the_best_validation(data, tmp_path):
    seen = []

    class Watching(Trainer):
        def validate(self):
            acceptance = super().validate()
            seen.append((acceptance.acceptance_length, self.step, weights(self)))
            return acceptance

    trainer = Watching(run_config(data, tmp_path, steps=20, validate_every=2, learning_rate=0.02, schedule="constant"))
    trainer.run()
    value, step, expected = max(seen, key=lambda entry: entry[0])  # the first of equals
    assert (trainer.best, trainer.best_step) == (value, step)
    trainer.load_best()
    assert not differing(weights(trainer), expected)


def test_a_mask_token_that_occurs_in_the_data_is_refused(data, tmp_path):
    used = int(data.ids[0, 3])
    times = int((data.ids == used).sum())
    with pytest.raises(ValueError, match=f"mask_token_id={used} occurs {times} times"):
        Trainer(run_config(data, tmp_path, drafter=architecture(mask_token_id=used)))
    assert MASK not in data.ids


def test_nothing_to_validate_on_is_refused_before_training(data, tmp_path):
    """Found at the end, it would cost the whole run: no best weights would exist."""
    examples = data.write("no-validation", [data.mask] * DOCUMENTS, validation=0)
    with pytest.raises(ValueError, match=r"the validation split \(0 documents\) has no answer"):
        Trainer(run_config(data, tmp_path, examples=examples))


def test_nothing_to_train_on_is_refused(data, tmp_path):
    examples = data.write("no-training", [[0] * (PROMPT + ANSWER)])
    with pytest.raises(ValueError, match=r"the train split \(1 documents\) has no answer"):
        Trainer(run_config(data, tmp_path, examples=examples))


def test_blocks_longer_than_every_document_are_refused(data, tmp_path):
    length = PROMPT + ANSWER
    Trainer(run_config(data, tmp_path / "fits", drafter=architecture(block_size=length - 1)))
    with pytest.raises(ValueError, match=rf"block_size={length} is longer .*: the longest has {length} tokens"):
        Trainer(run_config(data, tmp_path / "too-long", drafter=architecture(block_size=length)))


def test_losses_of_no_anchor_are_refused(data, tmp_path):
    trainer = Trainer(run_config(data, tmp_path))
    with pytest.raises(ValueError, match="anchors_A is empty"):
        trainer.criterion(pack([trainer.train_documents[0]]), torch.tensor([], dtype=torch.long))


def test_states_of_other_layers_are_refused_before_training(data, tmp_path):
    drafter = architecture(aux_hidden_state_layer_ids=(1, 2, 3))
    with pytest.raises(ValueError, match=r"states are 256 wide, the drafter reads 384 .*=\[1, 2, 3\]"):
        Trainer(run_config(data, tmp_path, drafter=drafter))


def test_non_finite_gradients_stop_the_run_and_spare_the_weights(data, tmp_path):
    trainer = Trainer(run_config(data, tmp_path))
    before = weights(trainer)
    trainer.drafter.lm_head.data[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="step 0: gradient norm is nan"):
        trainer.train_step()
    assert not differing(before, weights(trainer))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"loss": {"hinge": 1.0}}, r"loss=\{'hinge': 1.0\} must weight"),
        ({"loss": {"ce": 0.0}}, "must weight at least one of ce, kl, rkl"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"optimizer": "sgd"}, "optimizer='sgd' must be one of adamw, muon"),
        ({"schedule": "step"}, "schedule='step' must be one of cosine, linear, constant"),
        ({"dtype": "float16"}, "dtype='float16' must be one of auto, bfloat16, float32"),
        ({"num_speculative_tokens": 5}, r"num_speculative_tokens=5 must lie in 1\.\.4"),
    ],
)
def test_settings_out_of_range_are_refused(data, tmp_path, choices, message):
    with pytest.raises(ConfigError, match=message):
        run_config(data, tmp_path, **choices)


def test_a_train_config_survives_its_file(data, tmp_path):
    config = run_config(data, tmp_path)
    config.save(tmp_path / "train.json")
    assert TrainConfig.load(tmp_path / "train.json") == config
    raw = json.loads((tmp_path / "train.json").read_text())
    raw["learning_rat"] = raw.pop("learning_rate")
    (tmp_path / "train.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"missing \['learning_rate'\], unknown \['learning_rat'\]"):
        TrainConfig.load(tmp_path / "train.json")
