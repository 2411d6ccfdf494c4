"""vLLM's own offline generation, in a process of the serving environment: the other side of `regeneration.py`.

    python benchmarks/offline_generate.py '{"model": ..., ...}'      # keyword arguments of vllm.LLM

Reads one round per line of standard input, {"prompt_token_ids": [[...], ...], "max_tokens": n}, and answers each with a
line {"seconds": s, "tokens": n} on standard output, after one {"ready": true}.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Serve rounds until standard input ends."""
    # Standard output carries the results; whatever vLLM prints goes to standard error.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    engine = LLM(**json.loads(sys.argv[1]), seed=0)
    results.write('{"ready": true}\n')
    for line in sys.stdin:
        work = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in work["prompt_token_ids"]]
        # Greedy, and nothing of generation_config.json: as the pipeline asks.
        sampling = SamplingParams(temperature=0.0, max_tokens=work["max_tokens"])
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        results.write(json.dumps({"seconds": seconds, "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
