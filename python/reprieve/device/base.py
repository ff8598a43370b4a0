"""`Ops`: the operations in which an architecture is written, once, whatever computes them.

A forward pass is a fixed sequence of calls that does not depend on the step: a device may execute each call at once
(`reference`), or record the calls when the model is loaded and replay them for every step. So an architecture never
looks into a buffer, never branches on data and never asks how many rows there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from reprieve.model.weights import Tensor

Buffer = TypeVar("Buffer")
"""What a device uses for activations: a NumPy array for the reference, the name of a buffer for a recording one."""


class Ops(Protocol, Generic[Buffer]):
    """Operations on the rows of the current step. "tokens" below is the number of tokens in the step.

    Weights are `Tensor`s of the loaded model; a linear weight is [outputs, inputs], as in the files. Architectures
    treat every buffer as a value that may be used again later, such as the residual. A device that reuses memory finds
    from the recorded calls which buffers are still needed.
    """

    def embed(self, table: Tensor) -> Buffer:
        """Return the rows of `table` [vocab, hidden] for the step's token ids: [tokens, hidden]."""

    def rms_norm(self, x: Buffer, weight: Tensor, eps: float) -> Buffer:
        """Return x / sqrt(mean(x²) + eps) * weight over the last axis of x [tokens, hidden]."""

    def add_rms_norm(self, x: Buffer, residual: Buffer, weight: Tensor, eps: float) -> tuple[Buffer, Buffer]:
        """Return (rms_norm(x + residual), x + residual)."""

    def linear(self, x: Buffer, weight: Tensor, bias: Tensor | None = None) -> Buffer:
        """Return x [tokens, inputs] times weight [outputs, inputs] transposed, plus bias [outputs]."""

    def head_norm(self, x: Buffer, weight: Tensor, eps: float) -> Buffer:
        """Return rms_norm over each head of x [tokens, heads * head_size], weight [head_size]."""

    def rope_append(self, layer: int, q: Buffer, k: Buffer, v: Buffer) -> Buffer:
        """Rotate q and k by their positions, write k and v into the KV pool of `layer`, return the rotated q."""

    def paged_attention(self, layer: int, q: Buffer) -> Buffer:
        """Attend each query to positions 0 up to its own, read back from the KV pool: [tokens, heads * head_size]."""

    def swiglu(self, gate: Buffer, up: Buffer) -> Buffer:
        """Return silu(gate) * up."""

    def select_readback(self, x: Buffer) -> Buffer:
        """Return the last token of each row that is read back: [rows read back, hidden]."""

    def argmax(self, logits: Buffer) -> None:
        """Choose the token of each row that is read back from logits [rows read back, vocab]; ties to the lowest."""
