# SPDX-License-Identifier: Apache-2.0
"""The points of one training step at which memory can peak, and what each holds beside the model states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from .architecture import Architecture
from .decoder import Mode, head_tape, layer_tape
from .tape import Footprint


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One point of the backward pass: bytes of activations by kind, and how far the gradients are.

    ``gradients_done`` is the share of the weights whose gradients have been made by then;
    ``gradient_in_flight`` bytes are being made, and are not yet where gradients are kept;
    ``beyond_kept_gradients`` is what of them is beyond the gradients done, where those stay in place.
    """

    name: str
    activations: Mapping[str, int]
    gradients_done: float
    gradient_in_flight: int
    beyond_kept_gradients: int

    @property
    def activation_bytes(self) -> int:
        return sum(self.activations.values())


@lru_cache(maxsize=4096)
def moments(architecture: Architecture, mode: Mode, *, checkpointing: bool) -> tuple[Moment, ...]:
    """The moments at which a step of this architecture can peak.

    The first backward step of the head; the backward step of the last layer (most activations),
    of the first layer (most gradients); the embedding's.
    """
    head_program, held = head_tape(architecture, mode)
    head = head_program.run(held=held)
    layers = [(layer.count, layer_tape(architecture, layer, mode).run()) for layer in architecture.layers]
    # A fused loss makes its gradients, and its peak, in the forward pass.
    loss = max(head.backward_peak - head.in_flight, head.forward_peak)
    stream = mode.tokens * architecture.hidden_size * mode.stream_width
    kept = sum(count * (stream if checkpointing else footprint.retained) for count, footprint in layers)
    kept_name = "checkpoints" if checkpointing else "layer_activations"
    mask = mode.tokens * mode.sequence_length if mode.attention != "flash" else 0
    logits = sum(value.bytes for value in held)
    tied = architecture.token_embedding_parameters * mode.compute_width if _tied(architecture, mode) else 0
    working = max(layers, key=lambda item: _transient(item[1], checkpointing))[1]
    transient = _transient(working, checkpointing)
    shared = {"attention_mask": mask, "logits_and_loss": logits}
    first = stream if checkpointing else working.retained
    return (
        Moment(
            name="head",
            activations={
                kept_name: kept,
                "attention_mask": mask,
                "logits_and_loss": loss,
            },
            gradients_done=0.0,
            gradient_in_flight=head.in_flight,
            beyond_kept_gradients=head.in_flight,
        ),
        Moment(
            name="last layer",
            activations={kept_name: kept, "working_layer": transient - working.in_flight, **shared},
            gradients_done=0.0,
            gradient_in_flight=tied + working.in_flight,
            beyond_kept_gradients=tied + working.in_flight,
        ),
        Moment(
            name="first layer",
            activations={kept_name: first, "working_layer": transient - working.in_flight, **shared},
            gradients_done=1.0,
            gradient_in_flight=tied + working.in_flight,
            beyond_kept_gradients=0,
        ),
        Moment(
            name="embedding",
            activations={"working_layer": stream, **shared},
            gradients_done=1.0,
            # A shared weight's two gradients and their sum stand side by side.
            gradient_in_flight=2 * tied + _embedding_gradient(architecture, mode),
            beyond_kept_gradients=2 * tied,
        ),
    )


def _tied(architecture: Architecture, mode: Mode) -> bool:
    """A shared weight's gradient from the head waits for the embedding's, to be added to it."""
    return architecture.tied_embeddings and mode.trains_base


def _embedding_gradient(architecture: Architecture, mode: Mode) -> int:
    return architecture.token_embedding_parameters * mode.compute_width if mode.trains_base else 0


def _transient(footprint: Footprint, checkpointing: bool) -> int:
    """Beyond what the layers keep: one layer's backward pass, before it its recomputation."""
    if not checkpointing:
        return footprint.backward_peak - footprint.retained
    recomputation = footprint.forward_peak + footprint.gradients_before_first_read
    return max(footprint.backward_peak, recomputation) - footprint.saved_input
