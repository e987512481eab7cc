# SPDX-License-Identifier: Apache-2.0
"""Final norm, output head and loss as a tape program."""

from __future__ import annotations

import math

from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.decoder import norm
from deepspeed_provider.sizing.linears import Linears
from deepspeed_provider.sizing.lora import embedding_projections
from deepspeed_provider.sizing.mode import FP32, Mode
from deepspeed_provider.sizing.tape import Tape, Value

LABEL = 8  # bytes of one token's label
# torchtune's default number of chunks of its chunked cross-entropy.
LOSS_CHUNKS = 8


def head_tape(architecture: Architecture, mode: Mode) -> tuple[Tape, tuple[Value, ...]]:
    """Final norm, output head and cross-entropy, and the values that whoever holds the model's output holds."""
    tape = Tape()
    x = tape.input(mode.tokens * architecture.hidden_size, mode.stream_width, needs_grad=True)
    if architecture.final_norm_parameters:
        x = norm(tape, x, architecture.norm, trained=mode.trains_base, width=architecture.hidden_size)
    for projection in embedding_projections(architecture)[1:]:
        projected = Linears(tape, mode).apply(x, projection)
        tape.keep_until_here(x)
        x = projected
    x = tape.cast(x, mode.head_width)
    if mode.loss == "fused":
        return _fused_loss(tape, x, architecture, mode), ()
    logits = _logits(tape, x, architecture, mode)
    held = (logits,) if mode.holds_logits else ()
    labels = mode.tokens * LABEL
    if mode.loss == "kernel":
        tape.op((logits,), 1, FP32, saved=(logits,), extra_saved=labels + mode.tokens * FP32)
        return tape, held
    if mode.loss == "chunked":
        # Of one chunk at a time there are fp32 logits, log-probabilities and the gradients of both.
        piece = 3 * FP32 * logits.elements // LOSS_CHUNKS
        tape.op((logits,), 1, FP32, saved=(logits,), extra_saved=labels, forward_temp=piece, backward_temp=piece)
        return tape, held
    wide = tape.cast(logits, FP32)
    log_probabilities = tape.op((wide,), wide.elements, FP32, saves_output=True)
    tape.op((log_probabilities,), 1, FP32, extra_saved=labels)
    return tape, held


def _logits(tape: Tape, x: Value, architecture: Architecture, mode: Mode) -> Value:
    gradient = architecture.token_embedding_parameters * mode.head_width if mode.trains_base else 0
    saved = (x,) if mode.trains_base else ()
    elements = mode.tokens * architecture.vocab_size
    logits = tape.op((x,), elements, mode.head_width, saved=saved, weight_gradient=gradient, reads_weight=True)
    if architecture.logit_softcap:
        divided = tape.op((logits,), elements, logits.width)
        bounded = tape.op((divided,), elements, logits.width, saves_output=True)
        logits = tape.op((bounded,), elements, logits.width)
    return logits


def _fused_loss(tape: Tape, x: Value, architecture: Architecture, mode: Mode) -> Tape:
    """Liger's fused linear cross-entropy: the gradients are made in the forward pass, piece by piece.

    The pieces are so many that the logits of one take about as much as the hidden states do.
    """
    pieces = 1 << math.ceil(math.log2(max(1, architecture.vocab_size / architecture.hidden_size)))
    logits = mode.tokens * architecture.vocab_size // pieces
    gradient = architecture.token_embedding_parameters * mode.head_width if mode.trains_base else 0
    temporary = logits * (mode.head_width + 2 * FP32)
    tape.op((x,), 1, FP32, extra_saved=x.bytes + gradient + mode.tokens * LABEL, forward_temp=temporary)
    return tape
