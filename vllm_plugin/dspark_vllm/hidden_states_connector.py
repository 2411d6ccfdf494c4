"""A hidden-states connector that works without CUDA streams and pinned memory."""

from __future__ import annotations

import fcntl
import os
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as upstream

from dspark_vllm.compatibility import require_connector_internals

require_connector_internals(upstream)


class _CompletedCopy:
    """Stands where upstream keeps a CUDA event: a copy within host memory is complete when made."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HiddenStatesConnector(upstream.ExampleHiddenStatesConnector):
    """Upstream's connector (same files, locks and client protocol) for verifiers in host memory as well.

    Each finished request leaves `<shared_storage_path>/<request id>.safetensors` with
    `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens]; an exclusive lock is held on
    `<that path>.lock` until the file is whole. On a GPU upstream's asynchronous copy is used unchanged.
    """

    def _submit_async_write(self, pending: upstream.PendingSave) -> None:
        if self._kv_cache is None or self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        tensors = {
            "hidden_states": self._gather_states(pending),
            "token_ids": pending.token_ids.clone(),
        }
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock_fd = self._lock_fds.pop(pending.req_id, None)
        if lock_fd is None and self.use_lock:
            lock_fd = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        done = _CompletedCopy()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock_fd)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _gather_states(self, pending: upstream.PendingSave) -> torch.Tensor:
        """Copy a request's states out of its cache blocks: [tokens, layers, hidden]."""
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        return upstream.extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous()
