"""The decoder of Llama, Mistral, Qwen2, Qwen3 and SmolLM2, written once over `Ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reprieve.device.base import Buffer, Ops
    from reprieve.model.config import ModelConfig
    from reprieve.model.weights import LayerWeights, ModelWeights


def forward(ops: Ops[Buffer], config: ModelConfig, weights: ModelWeights) -> None:
    """Compute one step: from its token ids to the token of each row that is read back.

    The sequence of calls depends on `config` and on which weights are there, never on the step, so that a device may
    record it once. Each residual add is fused with the norm that follows it, that of the next layer included. Raises
    what `ops` raises, and `ValueError` for weights of no layer.
    """
    if not weights.layers:
        raise ValueError("weights.layers: a decoder needs at least 1 layer, not 0")
    residual = ops.embed(weights.embedding)
    normed = ops.rms_norm(residual, weights.layers[0].attention_norm, config.rms_norm_eps)
    next_norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm]
    for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
        attended = _attention(ops, config, index, layer, normed)
        normed, residual = ops.add_rms_norm(attended, residual, layer.mlp_norm, config.rms_norm_eps)
        gated = ops.swiglu(ops.linear(normed, layer.gate), ops.linear(normed, layer.up))
        normed, residual = ops.add_rms_norm(ops.linear(gated, layer.down), residual, next_norm, config.rms_norm_eps)
    ops.argmax(ops.linear(ops.select_readback(normed), weights.output))


def _attention(ops: Ops[Buffer], config: ModelConfig, index: int, layer: LayerWeights, normed: Buffer) -> Buffer:
    """Return the attention block's output, before the residual add: [tokens, hidden]."""
    q = ops.linear(normed, layer.q, layer.q_bias)
    k = ops.linear(normed, layer.k, layer.k_bias)
    v = ops.linear(normed, layer.v, layer.v_bias)
    if layer.q_norm is not None:
        q = ops.head_norm(q, layer.q_norm, config.rms_norm_eps)
    if layer.k_norm is not None:
        k = ops.head_norm(k, layer.k_norm, config.rms_norm_eps)
    q = ops.rope_append(index, q, k, v)
    return ops.linear(ops.paged_attention(index, q), layer.o, layer.o_bias)
