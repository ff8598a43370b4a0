"""A worker that decodes with llama.cpp: one `llama_decode` a step, with one token of each sequence.

Its defaults are kept (batches of 2048 and 512, flash attention where it chooses so, KV in F16), but for the number of
threads and one KV cache for all sequences.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from benches.peers.protocol import Measurement, Ready, Setup, Task, Watch, serve

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_SPACE: Final = 1
"""What `llama_decode` returns where no place in the KV cache is left; nothing has changed then."""


class LlamaRunner:
    """A model and a context; the KV cache is cleared before each task."""

    def __init__(self, setup: Setup) -> None:
        # By its name: it is installed beside this worker alone, where no type checker looks.
        self._api: Any = importlib.import_module("llama_cpp")
        if setup.kv != "f16":
            raise ValueError(f"kv must be f16, llama.cpp's default, not {setup.kv}")
        self._api.llama_backend_init()
        model = self._api.llama_model_load_from_file(setup.model.encode(), self._api.llama_model_default_params())
        if not model:
            raise OSError(f"llama.cpp does not load {setup.model}")
        settings = self._api.llama_context_default_params()
        settings.n_ctx = setup.kv_positions
        settings.n_seq_max = setup.sequences
        settings.n_threads = settings.n_threads_batch = setup.threads
        settings.kv_unified = True
        self._context = self._api.llama_init_from_model(model, settings)
        if not self._context:
            raise MemoryError(f"llama.cpp makes no context of {setup.kv_positions} positions")
        self._vocab_size: int = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(model))
        self._batch_size: int = self._api.llama_n_batch(self._context)
        self._batch = self._api.llama_batch_init(self._batch_size, 0, 1)

    @property
    def ready(self) -> Ready:
        return Ready(self._api.__version__, self._api.llama_n_ctx(self._context))

    def run(self, task: Task) -> Measurement:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        tokens: list[list[int]] = [[] for _ in task.prompts]
        watch = Watch(tokens)
        rows = [
            (token, position, seq, position + 1 == len(prompt))
            for seq, prompt in enumerate(task.prompts)
            for position, token in enumerate(prompt)
        ]
        has_space = True
        while rows and has_space:
            has_space = all(
                self._decode(rows[begin : begin + self._batch_size], tokens)
                for begin in range(0, len(rows), self._batch_size)
            )
            watch.look()
            rows = [
                (had[-1], len(task.prompts[seq]) + len(had) - 1, seq, True)
                for seq, had in enumerate(tokens)
                if had and len(had) < task.new_tokens
            ]
        return watch.measurement(stopped="" if has_space else "no place left in the KV cache")

    def _decode(self, rows: list[tuple[int, int, int, bool]], tokens: list[list[int]]) -> bool:
        """Decode rows of (token, position, sequence, whether it gives a token); False if there was no place."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, seq, gives_token) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = seq
            batch.logits[index] = gives_token
        status: int = self._api.llama_decode(self._context, batch)
        if status == NO_SPACE:
            return False
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        seqs = [seq for _, _, seq, gives_token in rows if gives_token]
        for seq, token in zip(seqs, self._best_tokens(len(seqs)), strict=True):
            tokens[seq].append(token)
        return True

    def _best_tokens(self, count: int) -> Iterable[int]:
        """Return the best token of each row that gives one, in the order of the batch."""
        if not count:
            return ()
        address = ctypes.cast(self._api.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        best: list[int] = np.ctypeslib.as_array(address, (count, self._vocab_size)).argmax(axis=1).tolist()
        return best


if __name__ == "__main__":
    serve(LlamaRunner)
