"""Train a drafter: `python -m dspark_model.train --config train.json`. Run again to continue after a stop or a kill.

SIGTERM and SIGINT save a checkpoint and exit with 143 and 130.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from dspark_model.checkpoint import save_checkpoint
from dspark_model.config import ConfigError
from dspark_model.host_memory import return_freed_tensors
from dspark_model.train_config import TrainConfig
from dspark_model.trainer import ResumeError, Trainer


def main(argv: list[str] | None = None) -> int:
    """Train, then write the best weights as a checkpoint that vLLM loads to `<output>/drafter`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="JSON written by TrainConfig.save")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    return_freed_tensors()
    try:
        config = TrainConfig.load(arguments.config)
        config.output.mkdir(parents=True, exist_ok=True)
        config.scratch.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(config)
    except (ConfigError, ResumeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    received: list[int] = []

    def stop(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        trainer.stop_requested = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    if not trainer.run():
        return 128 + received[0]
    verifier_config = json.loads((config.verifier / "config.json").read_text())
    save_checkpoint(
        config.output / "drafter",
        trainer.load_best(),
        verifier_name_or_path=str(config.verifier.resolve()),
        verifier_architectures=verifier_config["architectures"],
    )
    result = {
        "walked_acceptance_length": trainer.best,
        "best_step": trainer.best_step,
        "steps": trainer.step,
        "train_seconds": round(trainer.seconds, 1),
    }
    (config.output / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
