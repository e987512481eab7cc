# SPDX-License-Identifier: Apache-2.0
"""The points of one training step at which memory can peak, and what each holds beside the model states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from deepspeed_provider.sizing.architecture import Architecture, Layer
from deepspeed_provider.sizing.decoder import layer_tape
from deepspeed_provider.sizing.head import head_tape
from deepspeed_provider.sizing.linears import Linears
from deepspeed_provider.sizing.lora import embedding_projections
from deepspeed_provider.sizing.mode import Mode
from deepspeed_provider.sizing.tape import Footprint, Tape


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One point of the backward pass: bytes of activations by kind, and how far the gradients are.

    ``gradients_done`` is the share of the weights whose gradients were made before it;
    ``gradient_in_flight`` bytes are being made, and are handed on one by one;
    ``beyond_kept_gradients`` takes its place where gradients stay where they are made.
    """

    name: str
    activations: Mapping[str, int]
    gradients_done: float
    gradient_in_flight: int
    beyond_kept_gradients: int

    @property
    def activation_bytes(self) -> int:
        return sum(self.activations.values())


# A whole vocabulary's gradient leaves: the head's, once the final norm's is made; the embedding's at the end.
GIVEN_AWAY: Final = frozenset({"head reduced", "embedding reduced"})


@lru_cache(maxsize=4096)
def moments(architecture: Architecture, mode: Mode, *, checkpointing: bool) -> tuple[Moment, ...]:
    """The moments at which a step of this architecture can peak.

    The last layer's forward pass, unless it is gone through again; the first backward step of the head;
    the backward step of the last layer (most activations), of the first layer (most gradients); the embedding's.
    Those of :data:`GIVEN_AWAY` matter where a gradient needs room on its way to its rank or to the host.
    """
    return _Step(architecture, mode, checkpointing).moments()


@lru_cache(maxsize=4096)
def _of_layer(architecture: Architecture, layer: Layer, mode: Mode, *, needs_grad: bool = True) -> Footprint:
    """The same with checkpointing and without: what differs is when it is asked for."""
    return layer_tape(architecture, layer, mode, needs_grad=needs_grad).run()


@dataclass(frozen=True, kw_only=True)
class _Transient:
    """Bytes beyond what is kept from before: without any weight's gradient, and with those of one kind."""

    bare: int
    in_flight: int
    beyond_kept: int


class _Step:
    def __init__(self, architecture: Architecture, mode: Mode, checkpointing: bool) -> None:
        self.architecture, self.mode, self.checkpointing = architecture, mode, checkpointing
        self.layers = [(layer.count, _of_layer(architecture, layer, mode)) for layer in architecture.layers]
        self.first = self._first_layer()
        self.stream = mode.tokens * architecture.hidden_size * mode.stream_width
        self.whole_mask = _mask(architecture, mode)
        # Booleans outlive the forward pass only as an argument of checkpointed layers; ALiBi's numbers are kept.
        self.mask = self.whole_mask if checkpointing or architecture.alibi else 0
        self.embedding = architecture.token_embedding_parameters * mode.compute_width if mode.trains_base else 0
        # A shared weight's gradient from the head waits for the embedding's, to be added to it.
        self.waiting = self.embedding if architecture.tied_embeddings else 0
        of_layers = sum(count * footprint.weight_gradients for count, footprint in self.layers)
        self.all_gradients = of_layers + 2 * self.embedding - self.waiting

    def _first_layer(self) -> Footprint:
        """Checkpointing makes even a frozen embedding's output ask for its gradient; else autograd starts later."""
        if self.mode.trains_base or self.checkpointing or self._adapts_embedding():
            return self.layers[0][1]
        return _of_layer(self.architecture, self.architecture.layers[0], self.mode, needs_grad=False)

    def moments(self) -> tuple[Moment, ...]:
        program, held = head_tape(self.architecture, self.mode)
        head = program.run(held=held)
        kept = self._kept(self.first) + sum(count * self._kept(footprint) for count, footprint in self.layers)
        kept += self._embedding_output() - self._kept(self.layers[0][1])
        kept_name = "checkpoints" if self.checkpointing else "layer_activations"
        logits = {"attention_mask": self.mask, "logits_and_loss": sum(value.bytes for value in held)}
        loss = _head(head)
        last = max((footprint for _, footprint in self.layers), key=self._transient_total)
        first = max((*(footprint for _, footprint in self.layers[1:]), self.first), key=self._total)
        made_by_head = self.embedding - self.waiting
        last_layer, first_layer = self._layer(last), self._layer(first)
        tables = {"position_tables": self._position_tables()}
        logits |= tables
        return (
            *self._last_forward(kept, tables),
            Moment(
                name="head",
                activations={kept_name: kept, **tables, "attention_mask": self.mask, "logits_and_loss": loss.bare},
                gradients_done=0.0,
                # A shared weight's gradient is not handed on yet.
                gradient_in_flight=loss.beyond_kept if self.waiting else loss.in_flight,
                beyond_kept_gradients=loss.beyond_kept,
            ),
            Moment(
                name="head reduced",
                activations={kept_name: kept, **logits},
                gradients_done=self._share(made_by_head),
                gradient_in_flight=self.embedding,
                beyond_kept_gradients=self.embedding,
            ),
            Moment(
                name="last layer",
                activations={**_beside(kept_name, kept, last_layer), **logits},
                gradients_done=self._share(made_by_head),
                gradient_in_flight=self.waiting + last_layer.in_flight,
                beyond_kept_gradients=self.waiting + last_layer.beyond_kept,
            ),
            Moment(
                name="first layer",
                activations={
                    **_beside(kept_name, self._embedding_output() + self._kept(first), first_layer),
                    **logits,
                },
                gradients_done=self._share(self.all_gradients - self.embedding - first.weight_gradients),
                gradient_in_flight=self.waiting + first_layer.in_flight,
                beyond_kept_gradients=self.waiting + first_layer.beyond_kept,
            ),
            Moment(
                name="embedding",
                activations={
                    "working_layer": self.stream if not self.waiting else max(0, self.stream - self.waiting),
                    "logits_and_loss": logits["logits_and_loss"],
                },
                gradients_done=self._share(self.all_gradients - self.embedding),
                # A shared weight's two gradients and their sum stand side by side, once the stream's is used.
                gradient_in_flight=self.embedding + 2 * self.waiting,
                beyond_kept_gradients=self.embedding + 2 * self.waiting,
            ),
            Moment(
                name="embedding reduced",
                activations={"logits_and_loss": logits["logits_and_loss"]},
                gradients_done=self._share(self.all_gradients - self.embedding),
                gradient_in_flight=self.embedding,
                beyond_kept_gradients=self.embedding,
            ),
        )

    def _last_forward(self, kept: int, tables: Mapping[str, int]) -> tuple[Moment, ...]:
        """The model's and the layer's frames still refer to the embedding's output and to the layer's input."""
        if self.checkpointing:
            return ()
        working = max(layer.forward_peak - layer.retained + self._unsaved_input(layer) for _, layer in self.layers)
        embedded = self.stream if self.architecture.position_rows else self._unsaved_input(self.first)
        return (
            Moment(
                name="last layer forward",
                activations={
                    "layer_activations": kept,
                    "working_layer": working + embedded,
                    "attention_mask": self.whole_mask,
                    **tables,
                },
                gradients_done=0.0,
                gradient_in_flight=0,
                beyond_kept_gradients=0,
            ),
        )

    def _unsaved_input(self, layer: Footprint) -> int:
        return 0 if layer.saved_input else self.stream

    def _position_tables(self) -> int:
        """Sine and cosine of every position, which all layers share."""
        return 2 * self.mode.sequence_length * self.architecture.rotary_dim * self.mode.stream_width

    def _kept(self, layer: Footprint) -> int:
        return self.stream if self.checkpointing else layer.retained

    def _embedding_output(self) -> int:
        """What the layers' own inputs do not count of it.

        A frozen embedding's output, asked for its gradient for checkpointing's sake, is a leaf, which autograd
        holds; without position embeddings it is the first layer's input itself. A trained projection saves it.
        """
        architecture, mode = self.architecture, self.mode
        width = architecture.embedding_width or architecture.hidden_size
        leaf = self.checkpointing and architecture.position_rows > 0 and not mode.trains_base
        found = mode.tokens * width * mode.stream_width if leaf else 0
        for projection in embedding_projections(architecture)[:1]:
            tape = Tape()
            x = tape.input(mode.tokens * width, mode.stream_width, needs_grad=mode.trains_base or leaf)
            Linears(tape, mode).apply(x, projection)
            kept = tape.run()
            # What the projection saves of its input is that leaf.
            found += kept.retained - (kept.saved_input if leaf else 0)
        return found

    def _adapts_embedding(self) -> bool:
        """Autograd then starts before the first layer."""
        return any(linear in dict(self.mode.adapter_ranks) for linear in embedding_projections(self.architecture)[:1])

    def _share(self, gradients: int) -> float:
        return gradients / self.all_gradients if self.all_gradients else 0.0

    def _transient_total(self, layer: Footprint) -> int:
        found = self._layer(layer)
        return found.bare + found.in_flight

    def _total(self, layer: Footprint) -> int:
        return self._kept(layer) + self._transient_total(layer)

    def _layer(self, layer: Footprint) -> _Transient:
        """Beyond what the layers keep: one layer's backward pass, before it its recomputation."""
        before = layer.saved_input if self.checkpointing else layer.retained
        recomputation = layer.recomputation_peak + layer.gradients_before_first_read if self.checkpointing else 0
        bare = max(layer.backward_peak, recomputation) - before - layer.in_flight
        kept = max(layer.kept_peak, recomputation) - before
        return _Transient(bare=bare, in_flight=layer.in_flight, beyond_kept=kept - bare)


def _beside(kept_name: str, kept: int, layer: _Transient) -> dict[str, int]:
    """When a large weight's gradient is made, what its own layer kept may already be gone."""
    return {kept_name: kept + min(0, layer.bare), "working_layer": max(0, layer.bare)}


def _mask(architecture: Architecture, mode: Mode) -> int:
    """One that all layers share: booleans, or ALiBi's numbers for each head, for SDPA to add."""
    if mode.attention == "flash":
        return 0
    if architecture.alibi and mode.attention == "sdpa":
        return mode.tokens * mode.sequence_length * architecture.num_heads * mode.stream_width
    return mode.tokens * mode.sequence_length


def _head(head: Footprint) -> _Transient:
    """A fused loss makes its gradients, and its peak, in the forward pass."""
    in_flight = head.in_flight if head.backward_peak > head.forward_peak else 0
    bare = max(head.backward_peak, head.forward_peak) - in_flight
    return _Transient(bare=bare, in_flight=in_flight, beyond_kept=max(head.kept_peak, head.forward_peak) - bare)
