"""The demo: eight questions, and budgets that are far too small for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from reprieve.cli.plan import Plan, Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping

QUESTIONS: Final[dict[str, tuple[str, int]]] = {
    "tides": ("Why does the sea have tides?", 56),
    "paris": ("What is the capital of France?", 32),
    "sky": ("Explain to a child why the sky is blue.", 48),
    "haiku": ("Write a haiku about patience.", 40),
    "bread": ("How does yeast make bread rise?", 56),
    "primes": ("Name the first five prime numbers.", 40),
    "bees": ("Tell me one surprising fact about bees.", 48),
    "sleep": ("Give three tips for better sleep.", 64),
}
"""Each with its budget of tokens, which keeps the answers short enough to wait for."""

# Counted in blocks and bytes, never in time, so that the same happens on every machine. The eight need 83 blocks
# together. A position takes 23,040 bytes (30 layers, keys and values of 3 heads of 64 float16), so the host budget
# holds one image: who gives way while it is full is replayed. No head room and little immunity make it lively. Who
# gives way when depends on the depth, though nobody's answer does.
SETTINGS: Final = {
    "kv_blocks": 30,
    "block_size": 8,
    "max_slots": 8,
    "host_kv_bytes": 10 * 8 * 23_040,
    "head_room": 0,
    "immunity_tokens": 2,
    "depth": 2,
}


def demo_plan(
    json_path: str | None = None, trace_path: str | None = None, settings: Mapping[str, int] | None = None
) -> Plan:
    """Return the demo as a plan: the model "demo", parked by exhaustion alone, each answer compared.

    `settings` replace some of the demo's own, such as the depth.
    """
    prompts = tuple(
        Prompt(f"question {request_id}", request_id, question, True, max_new_tokens)
        for request_id, (question, max_new_tokens) in QUESTIONS.items()
    )
    settings = SETTINGS | dict(settings or {})
    return Plan("demo", prompts, settings=settings, check_alone=True, json_path=json_path, trace_path=trace_path)
