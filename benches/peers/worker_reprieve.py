"""A worker that decodes with reprieve, token ids in and out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from benches.peers.protocol import Measurement, Ready, Setup, Task, Watch, serve

from reprieve import Engine, __version__, load

if TYPE_CHECKING:
    from reprieve.loading import LoadedModel

BLOCK_SIZE: Final = 16


class ReprieveRunner:
    """The model is loaded once; each task has an engine, and so an empty pool, of its own."""

    def __init__(self, setup: Setup) -> None:
        weights: Any = setup.weights  # both are checked by reprieve
        self._kv: Any = setup.kv
        # Without its text side: the peers do not detokenize either.
        self._model: LoadedModel = replace(
            load(setup.model, device="cpu", weights=weights, threads=setup.threads), text=None
        )
        self._sequences = setup.sequences
        self._blocks = setup.kv_positions // BLOCK_SIZE

    @property
    def ready(self) -> Ready:
        with self._engine() as engine:
            pool = engine.config.kv_blocks * engine.config.block_size
        return Ready(f"{__version__}, device {self._model.device}", pool)

    def run(self, task: Task) -> Measurement:
        with self._engine() as engine:
            tokens: list[list[int]] = [[] for _ in task.prompts]
            watch = Watch(tokens)
            handles = [
                engine.submit(prompt, max_new_tokens=task.new_tokens, ignore_eos=True) for prompt in task.prompts
            ]
            while engine.step().state != "idle":
                for had, handle in zip(tokens, handles, strict=True):
                    had.extend(handle.tokens[len(had) :])
                watch.look()
            failed = [handle.finish_reason for handle in handles if handle.finish_reason != "length"]
            parks = engine.stats.parks_by_spill + engine.stats.parks_by_replay
            return watch.measurement(parks=parks, stopped=f"ended with {failed[0]}" if failed else "")

    def _engine(self) -> Engine:
        return Engine(
            self._model, kv=self._kv, kv_blocks=self._blocks, block_size=BLOCK_SIZE, max_slots=self._sequences
        )


if __name__ == "__main__":
    serve(ReprieveRunner)
