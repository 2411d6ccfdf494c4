"""What vLLM lacks to serve and observe DSpark without a GPU; installed beside vLLM only.

- `dspark_vllm.hidden_states_connector.HiddenStatesConnector`: writes the verifier's hidden states to files,
  on CPU and on GPU. Named by `--kv-transfer-config`, so it costs nothing unless asked for.
- `register`: the `vllm.general_plugins` entry point. Lets `method="dspark"` run on vLLM's first-generation
  model runner, the only one that works without Triton. Does nothing on a GPU, where vLLM's own
  implementation runs.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.dspark_vllm")


def register() -> None:
    """Enable DSpark decoding on a CPU platform whose vLLM looks as expected; otherwise change nothing.

    vLLM calls this in every process it starts, the API server included; calling it again has no effect.
    A vLLM with other internals gets a warning that says what differs, and keeps its own behaviour.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from dspark_vllm.compatibility import find_mismatch
    from dspark_vllm.runner_hook import install_hook

    mismatch = find_mismatch()
    if mismatch is not None:
        logger.warning("DSpark decoding on CPU stays off: %s", mismatch)
        return
    install_hook()
