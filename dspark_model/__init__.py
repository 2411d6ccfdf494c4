"""DSpark drafters in plain PyTorch: architecture, losses, acceptance metrics, training and checkpoints.

Runs with only torch, transformers, safetensors and numpy; knows nothing of orchestration, networks or recipes.
Start reading at `dspark_model.drafter` (the forward), then `dspark_model.losses` and `dspark_model.trainer`.
"""

from dspark_model.config import ConfigError, DrafterConfig

__all__ = ["ConfigError", "DrafterConfig"]
