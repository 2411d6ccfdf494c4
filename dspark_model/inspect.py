"""What a drafter's checkpoint is, and everything that vLLM would do otherwise than its owner may expect.

`python -m dspark_model.inspect DIR`; exit code 0: no errors found, 1: errors, 2: no DSpark checkpoint or unreadable.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from dspark_model.checkpoint import EMBEDDING, HEAD, read_drafter_config
from dspark_model.findings import SEVERITIES, Facts, Finding
from dspark_model.findings_format import format_findings
from dspark_model.findings_layers import layer_findings
from dspark_model.findings_tensors import tensor_findings
from dspark_model.foreign_config import rope_settings

WIDTH, LABEL = 110, 24
HELP = """\
Describes a DSpark drafter in the speculators format (ours too) or in DeepSpec's, and lists what vLLM 0.32 would do
with it: what it refuses, and what it serves otherwise than trained without saying so. Needs neither vLLM nor the
verifier; where the verifier's folder is on this machine, sizes are compared with its config.json."""
EPILOG = """\
findings:
  error    vLLM refuses the checkpoint, or drafts by another rule than it was trained for
  warning  less than the owner expects, or a setting to look at
  note     worth knowing
exit code:
  0  no errors (warnings and notes do not count)
  1  at least one error
  2  not a DSpark checkpoint, or unreadable

examples:
  python -m dspark_model.inspect runs/qwen3-1.7b/drafter
  python -m dspark_model.inspect DIR --json | jq '.findings[] | select(.severity == "error")'"""


def inspect_checkpoint(folder: Path) -> tuple[dict[str, Any], list[Finding]]:
    """Description and findings, the gravest first.

    Raises:
        FileNotFoundError: no checkpoint in the folder.
        ValueError: unreadable, or no DSpark drafter of Qwen3 layers.
    """
    facts = Facts.of(folder)
    found = [*format_findings(facts), *layer_findings(facts), *tensor_findings(facts)]
    return describe(facts), sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def describe(facts: Facts) -> dict[str, Any]:
    """What the checkpoint is, as plain data."""
    layer, rope = facts.layer, rope_settings(facts.layer)
    V, W = facts.vocab_size, facts.draft_vocab_size
    rank = facts.setting("markov_rank")
    return {
        "folder": str(facts.files.folder),
        "format": f"speculators {facts.top.get('speculators_version', '')}".strip()
        if facts.speculators
        else "DeepSpec",
        "read_by_dspark_model": _readable(facts),
        "verifier": facts.verifier_name,
        "verifier_architectures": (facts.section.get("verifier") or {}).get("architectures"),
        "verifier_num_layers": facts.verifier_num_layers,
        "architectures": facts.top.get("architectures"),
        "num_layers": layer.get("num_hidden_layers"),
        "hidden_size": layer.get("hidden_size"),
        "intermediate_size": layer.get("intermediate_size"),
        "heads": {
            "query": layer.get("num_attention_heads"),
            "key_value": layer.get("num_key_value_heads"),
            "dim": layer.get("head_dim"),
        },
        "parameters": count_parameters(facts),
        "dtypes": sorted({tensor.dtype for name, tensor in facts.files.tensors.items() if name not in ("d2t", "t2d")}),
        "vocab_size": V,
        "draft_vocab_size": W,
        "mask_token_id": facts.top.get("mask_token_id"),
        "layer_ids_as_stored": {facts.layer_ids_field: facts.top.get(facts.layer_ids_field)},
        "layer_ids": facts.layer_ids,
        "hidden_states": [hidden_state(i, facts.verifier_num_layers) for i in facts.layer_ids],
        "markov_head": {"type": facts.setting("markov_head_type"), "rank": rank} if rank else None,
        "confidence_head": {"with_markov": facts.setting("confidence_head_with_markov")}
        if facts.has_confidence_head
        else None,
        "block_size": facts.block_size,
        "sample_from_anchor": facts.sample_from_anchor,
        "trained_proposals": facts.trained_proposals,
        "speculative_tokens": facts.speculative_tokens,
        "layer_kinds": facts.kinds,
        "sliding_window": layer.get("sliding_window") if "sliding" in facts.kinds else None,
        "rope": rope,
        "max_position_embeddings": layer.get("max_position_embeddings"),
    }


def hidden_state(layer_id: int, num_layers: int | None) -> str:
    """What a tapped layer id (our numbering) is among transformers' `hidden_states`."""
    if layer_id == 0:
        return "hidden_states[0], the embedding's output"
    if num_layers is not None and layer_id == num_layers:
        return f"output of the last layer before the final norm (hidden_states[{layer_id}] is after it)"
    return f"hidden_states[{layer_id}], the residual stream after {layer_id} layer{'s' * (layer_id != 1)}"


def count_parameters(facts: Facts) -> dict[str, int]:
    """Stored numbers by part of the drafter, and in all; maps are no parameters."""
    counts: dict[str, int] = {}
    for name, tensor in facts.files.tensors.items():
        if name in ("d2t", "t2d"):
            continue
        part = name.partition(".")[0]
        part = "norms" if part in ("norm", "hidden_norm") else part
        counts[part] = counts.get(part, 0) + prod(tensor.shape)
    frozen = sum(prod(facts.files.tensors[name].shape) for name in (EMBEDDING, HEAD) if name in facts.files.tensors)
    return {**dict(sorted(counts.items())), "all": sum(counts.values()), "trained": sum(counts.values()) - frozen}


def _readable(facts: Facts) -> str:
    try:
        read_drafter_config(facts.top)
    except ValueError as error:
        return f"no: {error}"
    return "yes"


def report(description: dict[str, Any], findings: Iterable[Finding]) -> str:
    """The text that a person reads."""
    lines = [
        _wrapped(name.replace("_", " ").ljust(LABEL), _shown(value), indent=LABEL)
        for name, value in description.items()
    ]
    findings = list(findings)
    counts = [(sum(f.severity == severity for f in findings), severity) for severity in SEVERITIES]
    counted = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for count, severity in counts if count)
    lines += ["", f"findings: {counted or 'none'}"]
    for finding in findings:
        lines += ["", _wrapped(f"{finding.severity.upper()}  ", f"{finding.field}: {finding.found}", indent=4)]
        lines += [_wrapped("    vLLM: ", finding.vllm), _wrapped("    do:   ", finding.remedy)]
        if finding.source:
            lines.append(f"    see:  {finding.source}")
    return "\n".join(lines)


def _wrapped(label: str, text: str, indent: int | None = None) -> str:
    following = " " * (len(label) if indent is None else indent)
    return textwrap.fill(
        label + text, WIDTH, subsequent_indent=following, break_long_words=False, break_on_hyphens=False
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(_shown(item) for item in value) or "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value > 99999 else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dspark_model.inspect",
        description=HELP,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with config.json and safetensors weights")
    parser.add_argument("--json", action="store_true", help="one JSON object: description and findings")
    options = parser.parse_args(arguments)
    try:
        description, findings = inspect_checkpoint(options.folder)
    except (OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if options.json:
        found = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"description": description, "findings": found}, indent=2))
    else:
        print(report(description, findings))
    return int(any(finding.severity == "error" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
