"""Greedy answers of a real model equal those of an independent implementation in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reprieve import Engine, Request

if TYPE_CHECKING:
    from reprieve import LoadedModel
    from reprieve.device.kv_pool import KvKind

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())[
    "prompts"
]
TINY_MARGIN = 1e-3  # the distance of the two best logits under which either may win
POSITION_ITEMS = 30 * 2 * 3 * 64  # layers, keys and values, KV heads, head size

pytestmark = pytest.mark.smollm2


@pytest.mark.parametrize(("device", "kv"), [("cpu", "f32"), ("cpu", "f16"), ("reference", "f32")])
def test_greedy_tokens_are_those_of_an_independent_implementation(
    device: str, kv: KvKind, request: pytest.FixtureRequest
) -> None:
    """All prompts at once, in a pool that holds about a third of what they need: neither may show."""
    model: LoadedModel = request.getfixturevalue("smollm2" if device == "cpu" else "smollm2_reference")
    host_kv_bytes = 136 * POSITION_ITEMS * (4 if kv == "f32" else 2)
    with Engine(model, kv=kv, kv_blocks=30, block_size=16, max_slots=8, host_kv_bytes=host_kv_bytes, depth=2) as engine:
        handles = [
            engine.submit(Request(prompt["text"], max_new_tokens=96, chat=prompt["kind"] == "chat"))
            for prompt in GOLDEN
        ]
        engine.run()
        assert engine.stats.parks_by_spill > 0
        assert engine.stats.parks_by_replay > 0
    assert len(handles) == len(GOLDEN) == 12
    compared = 0
    for handle, prompt in zip(handles, GOLDEN, strict=True):
        assert list(handle.prompt_tokens) == prompt["prompt_tokens"], prompt["text"]
        firm = next(
            (step for step, distance in enumerate(prompt["top2_margin"]) if distance < TINY_MARGIN),
            len(prompt["tokens"]),
        )
        assert handle.tokens[:firm] == prompt["tokens"][:firm], prompt["text"]
        compared += firm
    assert compared == 719, "no margin in the file is under the limit, so every token is compared"
