"""The recipe's sections about data: where prompts come from, how they are answered, what is learnt from the answers."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from tasks.recipe_section import Section

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?")
BUILTIN, SELF = "builtin", "self"
FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".jsonl.gz", ".ndjson.gz")


class PromptSource(Section):
    """One source of prompts. In a list, its name alone stands for a source with all defaults."""

    source: str = Field(
        min_length=1,
        description="`builtin`, `self`, a preset (`open-perfectblend`, `ultrachat`, `magpie`, `sharegpt`), a hub id "
        "`owner/name`, or a .jsonl, .json or .parquet file, local or `s3://`; `*` stands for several files",
    )
    weight: float = Field(1.0, gt=0, description="share of num_prompts, relative to the other sources'")
    config: str | None = Field(None, description="hub only: the data set's configuration")
    split: str | None = Field(None, description="hub only; null: the preset's, else `train`")
    revision: str | None = Field(None, description="hub only: commit sha; null: the newest, asked of the hub each run")
    streaming: bool = Field(False, description="hub only: read on demand instead of downloading the data set whole")
    column: str | None = Field(
        None, description="where the conversation is; null: `messages`, `conversations`, `prompt`, or a request log"
    )
    license: str | None = Field(None, description="of the prompts; null: what the hub says, else `unknown`")

    @property
    def kind(self) -> Literal["builtin", "self", "file", "hub"]:
        """Where the name points."""
        if self.source in (BUILTIN, SELF):
            return "builtin" if self.source == BUILTIN else "self"
        return "file" if "://" in self.source or self.source.endswith(FILE_SUFFIXES) else "hub"

    @model_validator(mode="after")
    def _only_what_applies(self) -> PromptSource:
        given = [name for name in ("config", "split", "revision", "streaming") if getattr(self, name)]
        if given and self.kind != "hub":
            raise ValueError(f"prompts.sources: {self.source!r} is no data set of the hub, so leave out {given[0]!r}")
        if (self.column or self.license) and self.kind in ("builtin", "self"):
            raise ValueError(f"prompts.sources: {self.source!r} has a column and a licence of its own: leave them out")
        if self.kind == "file" and not self.source.endswith(FILE_SUFFIXES):
            raise ValueError(
                f"prompts.sources: {self.source!r}: name files, which end in {', '.join(FILE_SUFFIXES)}; a folder's "
                f"are {self.source.rstrip('/') + '/*.jsonl'!r}"
            )
        if self.kind == "hub" and not _HUB_ID.fullmatch(self.source):
            raise ValueError(
                f"prompts.sources: {self.source!r} is neither a file ending in {', '.join(FILE_SUFFIXES)}, nor the id "
                "of a data set on the hub (owner/name)"
            )
        return self


class PromptsSection(Section):
    """Where the user turns come from, and which are left out."""

    sources: tuple[PromptSource, ...] = Field(
        (PromptSource(source=BUILTIN),), min_length=1, description="one or several, mixed by weight"
    )
    num_prompts: Annotated[int, Field(ge=2)] | Literal["all"] = Field(
        1000, description="the most conversations to take, training and validation together; all: no limit"
    )
    min_prompts: int | None = Field(
        None, ge=2, description="fewer that pass the filters fail the stage; null: half of num_prompts"
    )
    min_prompt_tokens: int = Field(2, ge=1, description="last user turns with fewer tokens are left out")
    max_prompt_tokens: int = Field(
        256, ge=8, description="longer conversations are left out; recorded answers and the chat template count"
    )
    languages: tuple[str, ...] | None = Field(
        None, min_length=1, description="ISO 639-1 codes of the user turns to keep, such as [en, de]; null: all"
    )
    near_duplicate_similarity: float | None = Field(
        0.9, gt=0, le=1, description="estimated Jaccard similarity from which a prompt is a duplicate; null: keep them"
    )
    decontamination_words: int = Field(
        8, ge=4, description="prompts that share so many words in a row with an evaluation prompt are left out"
    )
    max_unusable_share: float = Field(
        0.1, ge=0, le=1, description="more records of a source without a usable conversation fail the stage"
    )
    seed: int = Field(0, description="of the choice and order of prompts")

    @field_validator("sources", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        entries = value if isinstance(value, (list, tuple)) else [value]
        return [{"source": entry} if isinstance(entry, str) else entry for entry in entries]

    @property
    def fewest(self) -> int:
        """Prompts below which the stage fails."""
        return self.min_prompts or (2 if self.num_prompts == "all" else max(2, self.num_prompts // 2))

    @model_validator(mode="after")
    def _ranges(self) -> PromptsSection:
        if self.num_prompts != "all" and self.fewest > self.num_prompts:
            raise ValueError(
                f"prompts.min_prompts={self.min_prompts} is above prompts.num_prompts={self.num_prompts}: lower it"
            )
        if self.min_prompt_tokens >= self.max_prompt_tokens:
            raise ValueError(
                f"prompts.min_prompt_tokens={self.min_prompt_tokens} must be below "
                f"prompts.max_prompt_tokens={self.max_prompt_tokens}"
            )
        names = [source.source for source in self.sources]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"prompts.sources names {twice!r} twice: once, with the sum of the weights")
        return self


class ResponseMode(Section):
    """A way of answering: which chat template arguments a conversation is asked with."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_\-]*$", description="shown in reports, such as `thinking`")
    weight: float = Field(1.0, gt=0, description="share of the conversations, relative to the other modes'")
    reasoning_effort: Literal["low", "medium", "high"] | None = Field(
        None, description="for verifiers whose template knows it"
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(
        {}, description="arguments of the chat template, such as {enable_thinking: false}"
    )


class ResponsesSection(Section):
    """How the verifier answers."""

    max_new_tokens: int = Field(128, ge=1, description="length limit of an answer")
    max_turns: int = Field(8, ge=1, description="answers per conversation; later turns are left out")
    temperature: Annotated[float, Field(ge=0.0)] | Literal["model"] = Field(
        0.0, description="0: greedy, the most likely token each time; model: sample as generation_config.json says"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="null: 1, or generation_config.json's with `model`")
    top_k: int | None = Field(None, ge=0, description="0: no limit; null: 0, or generation_config.json's with `model`")
    modes: tuple[ResponseMode, ...] = Field(
        (), description="thinking on and off or reasoning efforts, mixed by weight; empty: the template's defaults"
    )
    tool_call_parser: str | None = Field(
        None,
        description="of vLLM, such as `hermes`, for prompts with tools; null: calls stay text",
    )
    reasoning_parser: str | None = Field(
        None, description="of vLLM, such as `qwen3`; null: thinking stays in the answer's text"
    )
    seed: int = Field(0, description="of sampling, and of each conversation's mode")
    max_failed_share: float = Field(0.02, ge=0.0, le=1.0, description="more failed conversations fail the stage")

    @model_validator(mode="after")
    def _consistent(self) -> ResponsesSection:
        if self.temperature == 0.0 and (self.top_p is not None or self.top_k is not None):
            raise ValueError(
                f"responses.top_p={self.top_p} and responses.top_k={self.top_k} have no effect with "
                "responses.temperature=0: leave them out, or raise the temperature"
            )
        names = [mode.name for mode in self.modes]
        if len(set(names)) < len(names):
            raise ValueError(f"responses.modes: the names {names} must differ")
        return self


class ExamplesSection(Section):
    """Training rows made of the answers."""

    validation_share: float = Field(0.06, gt=0.0, lt=0.5, description="share of conversations held out")
    max_length: int = Field(512, ge=16, description="tokens; longer rows are clipped on the right")
    min_supervised_tokens: int = Field(4, ge=1, description="shorter answers are left out")
    truncated_answers: Literal["keep", "drop"] = Field(
        "keep", description="what to do with answers that max_new_tokens cut off"
    )
    seed: int = Field(0, description="of the split")


class VocabSection(Section):
    """Draft vocabulary: the most frequent supervised tokens, or the verifier's whole vocabulary."""

    draft_vocab_size: Annotated[int, Field(ge=1)] | Literal["full", "auto"] = Field(
        8192, description="tokens the drafter may propose; auto: the smallest size within max_coverage_loss"
    )
    max_coverage_loss: float = Field(
        0.005,
        ge=0,
        lt=1,
        description="auto only: share of held-out answer tokens that the drafter may be unable to propose",
    )
