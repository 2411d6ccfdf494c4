"""Hidden states that a server wrote for one request, read with all the checks that catch a wrong file."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOCK_WAIT_SECONDS = 30.0
POLL_SECONDS = 0.02


class StatesError(RuntimeError):
    """A states file that cannot be trusted; the message says which check failed."""


def read_states(
    path: Path,
    expected_token_ids: Sequence[int],
    *,
    num_states: int | None = None,
    delete: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one request's states, waiting until the server has finished writing them.

    Args:
        path: file named in the answer.
        expected_token_ids: prompt + answer without its last token.
        num_states: layers per token that were asked for; None to accept any number.
        delete: remove the file and its lock, also when a check fails.

    Returns:
        States [tokens, layers, hidden] and token ids [tokens].

    Raises:
        StatesError: file missing or unreadable, other tokens, wrong shape, a value not finite, all zero.
    """
    from safetensors.torch import load

    try:
        try:
            tensors = load(_read_locked(path))
        except FileNotFoundError as error:
            raise StatesError(
                f"{path} is missing: the server did not write it, or it was read and deleted before"
            ) from error
        except StatesError:
            raise
        except Exception as error:
            raise StatesError(f"{path} is unreadable ({error}): was the server's disk full?") from error
        return _checked(path, tensors, expected_token_ids, num_states)
    finally:
        if delete:
            delete_states(path)


def delete_states(path: Path) -> None:
    """Remove a states file and its lock, if there."""
    path.unlink(missing_ok=True)
    _lock_of(path).unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _read_locked(path: Path) -> bytes:
    """Read the file under the shared lock, which the writer grants by releasing its exclusive one."""
    with _lock_of(path).open() as lock:
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StatesError(
                        f"{path} is still being written after {LOCK_WAIT_SECONDS:g} s: is the server alive?"
                    ) from None
                time.sleep(POLL_SECONDS)
        return path.read_bytes()


def _checked(
    path: Path, tensors: dict[str, torch.Tensor], expected_token_ids: Sequence[int], num_states: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if set(tensors) != {"hidden_states", "token_ids"}:
        raise StatesError(f"{path} holds {sorted(tensors)}, expected hidden_states and token_ids")
    states, token_ids = tensors["hidden_states"], tensors["token_ids"]
    if token_ids.tolist() != list(expected_token_ids):
        raise StatesError(
            f"{path} is of other tokens: {len(token_ids)} of them, expected {len(expected_token_ids)}; "
            f"first difference at {_first_difference(token_ids.tolist(), expected_token_ids)}"
        )
    if states.ndim != 3 or states.shape[0] != len(token_ids) or num_states not in {None, states.shape[1]}:
        wanted = f"[{len(token_ids)}, {num_states or 'layers'}, hidden]"
        raise StatesError(f"{path} has states of shape {list(states.shape)}, expected {wanted}")
    if not bool(states.isfinite().all()):
        raise StatesError(f"{path} has states that are not finite: the verifier overflows in this dtype")
    empty = (states == 0).all(dim=-1).any(dim=0)
    if bool(empty.any()):
        layers = empty.nonzero().flatten().tolist()
        raise StatesError(f"{path} has all-zero states in layer slots {layers}: the server did not fill them")
    return states, token_ids


def _first_difference(found: Sequence[int], expected: Sequence[int]) -> int:
    pairs = zip(found, expected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
