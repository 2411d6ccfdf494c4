"""What the flows are as commands: their help, their stages and what they print at the end."""

from __future__ import annotations

from collections.abc import Mapping

from flows.cli import FlowCommand
from tasks.manifest import ArtifactRef
from tasks.pipeline import DATA_STAGES, STAGE_NAMES
from tasks.store import ArtifactStore


def _show_release(store: ArtifactStore, refs: Mapping[str, ArtifactRef]) -> str:
    release = refs["release"]
    return f"{store.read_text(release, 'summary.txt') or ''}\n{release.uri}/summary.json"


def _show_data(store: ArtifactStore, refs: Mapping[str, ArtifactRef]) -> str:
    lines = [f"{name:<10}  {refs[name].uri}" for name in ("prompts", "examples", "vocab", "coverage")]
    return "\n".join([store.read_text(refs["coverage"], "coverage.md") or "", *lines, refs["responses"].uri])


FULL_PIPELINE = FlowCommand(
    flow="flows.full_pipeline:full_pipeline",
    stages=STAGE_NAMES,
    help="""
Train, measure and package a DSpark drafter: a small model with which vLLM gives the same answers faster.

Examples:

  python flows/full_pipeline.py --list-recipes

  python flows/full_pipeline.py --set training.learning_rate=3e-4 --plan

  python flows/full_pipeline.py --recipe my-model.yaml --store s3://bucket/dspark

  python flows/full_pipeline.py --force evaluation

The last line printed is the path of the release's summary.json.
""",
    show=_show_release,
)

REGENERATE = FlowCommand(
    flow="flows.regenerate:regenerate",
    stages=DATA_STAGES,
    help="""
Make training data: prompts, the verifier's own answers to them as exact token ids, training rows and the draft
vocabulary with its coverage.

Prompts come from files, data sets of the hub, request logs of your own service, the built-in set, or the verifier
itself; sources are mixed by weight. Answers come from a vLLM server that is started here, or from servers by URL. A run
that is killed goes on where it was.

Examples:

  python flows/regenerate.py --set prompts.sources=chats.jsonl --set prompts.num_prompts=all

  python flows/regenerate.py --set 'prompts.sources=[{source: s3://logs/2026-*.jsonl, weight: 3}, open-perfectblend]'

  python flows/regenerate.py --set 'serving.urls=[http://gpu1:8000, http://gpu2:8000]'

  python flows/regenerate.py --set vocab.draft_vocab_size=auto

The last line printed is the place of the answers, Parquet files with one row per answer.
""",
    show=_show_data,
)
