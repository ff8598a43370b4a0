"""A worker that decodes with vLLM, its engine in this process so that nothing runs while it waits.

Its defaults are kept (compiled graphs, chunked prefill), but for the size of its KV cache, prefix caching, which
repeated prompts would profit from, and the block size: 32, the smallest that its attention on a CPU takes.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from typing import Any, Final

from benches.peers.protocol import Measurement, Ready, Setup, Task, Watch, serve

BLOCK_SIZE: Final = 32
NULL_BLOCKS: Final = 1
"""Blocks of vLLM's pool that it never gives out."""


class VllmRunner:
    """One engine; `VLLM_ENABLE_V1_MULTIPROCESSING=0` and the number of threads come from the environment."""

    def __init__(self, setup: Setup) -> None:
        # By its name: it is installed beside this worker alone, where no type checker looks.
        self._vllm: Any = importlib.import_module("vllm")
        if setup.weights != setup.kv:
            raise ValueError(f"kv must be {setup.weights} as the weights are, vLLM's default, not {setup.kv}")
        dtype = {"bf16": "bfloat16", "f16": "float16"}[setup.weights]
        self._llm = self._vllm.LLM(
            model=setup.model,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=setup.context,
            max_num_seqs=setup.sequences,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=setup.kv_positions // BLOCK_SIZE + NULL_BLOCKS,
            enable_prefix_caching=False,
            disable_log_stats=False,  # they hold the number of preemptions
        )
        self._ids = map(str, itertools.count())

    @property
    def ready(self) -> Ready:
        cache = self._llm.llm_engine.vllm_config.cache_config
        return Ready(self._vllm.__version__, (cache.num_gpu_blocks - NULL_BLOCKS) * cache.block_size)

    def run(self, task: Task) -> Measurement:
        engine = self._llm.llm_engine
        sampling = self._vllm.SamplingParams(
            temperature=0, max_tokens=task.new_tokens, ignore_eos=True, detokenize=False
        )
        preempted_before = self._preemptions()
        tokens: list[list[int]] = [[] for _ in task.prompts]
        by_id = {next(self._ids): had for had in tokens}
        watch = Watch(tokens)
        for request_id, prompt in zip(by_id, task.prompts, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                by_id[output.request_id][:] = output.outputs[0].token_ids
            watch.look()
        short = any(len(had) < task.new_tokens for had in tokens)
        stopped = "ended early" if short else ""
        measurement = watch.measurement(stopped=stopped)
        return replace(measurement, parks=self._preemptions() - preempted_before)

    def _preemptions(self) -> int:
        return sum(int(metric.value) for metric in self._llm.get_metrics() if metric.name == "vllm:num_preemptions")


if __name__ == "__main__":
    serve(VllmRunner)
