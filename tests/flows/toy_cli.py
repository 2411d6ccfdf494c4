"""The project's command line over toy stages; `TOY_HANG=stage` makes that stage wait for a signal."""

import os
import time
from pathlib import Path

import tasks.pipeline
import tasks.verifier
import tasks.vllm_server
from tests.toy_stages import Toy, ToyServers, whole_pipeline

toy = Toy()


def hang(context) -> None:
    (context.output / "half").write_text("half")
    Path(os.environ["TOY_MARK"]).write_text("hanging")
    time.sleep(600)


def fail(context) -> None:
    raise RuntimeError("the trainer lost its way")


toy.before[os.environ.get("TOY_HANG", "")] = hang
toy.before[os.environ.get("TOY_FAIL", "")] = fail


class Servers(ToyServers):
    def close(self) -> None:
        print("servers closed", flush=True)


tasks.pipeline.load_stages = lambda names=(): whole_pipeline(toy)
tasks.vllm_server.ServerPool = Servers  # type: ignore[assignment,misc]
tasks.verifier.check_verifier = lambda recipe: None

if __name__ == "__main__":
    from flows.cli import run_command
    from flows.commands import FULL_PIPELINE

    run_command(FULL_PIPELINE)
