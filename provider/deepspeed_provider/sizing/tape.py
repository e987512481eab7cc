# SPDX-License-Identifier: Apache-2.0
"""What autograd keeps, and the peak on the way forward and back, of a program of tensor operations.

A program is written once, as the model's code is, with :class:`Tape`; :meth:`Tape.run` then plays it
forward and in reverse, counting bytes: a tensor lives while a later operation reads it or the
backward pass has it saved; a gradient lives from the first operation that gives it until its own
backward step has used it. Saved tensors are freed after the step that saved them, gradients
accumulate in place (as torch's engine does), and casting to the type a tensor already has copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Value:
    """A tensor: ``elements`` of ``width`` bytes. A view shares ``storage`` with its source."""

    elements: int
    width: int
    needs_grad: bool
    storage: Value | None = None  # None: its own

    @property
    def owner(self) -> Value:
        return self if self.storage is None else self.storage

    @property
    def bytes(self) -> int:
        return self.elements * self.width


@dataclass(eq=False, slots=True)
class _Node:
    inputs: tuple[Value, ...]
    output: Value
    saved: tuple[Value, ...]
    forward_temp: int
    backward_temp: int
    weight_gradient: int
    passes_gradient: bool  # the input's gradient is the output's own storage (add, view)
    reads_weight: bool  # its backward step asks for a saved weight
    also_read: tuple[Value, ...] = ()  # still referenced by the caller's frame

    @property
    def asks_for_saved(self) -> bool:
        return bool(self.saved) or self.reads_weight

    @property
    def saves_inputs_only(self) -> bool:
        """Those are put aside before the operation runs, its output after."""
        return all(value in self.inputs for value in self.saved)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one program. Peaks count from before the forward pass, the program's input left out."""

    retained: int  # saved for the backward pass; a saved input counts
    saved_input: int  # of that, the program's own input
    forward_peak: int
    recomputation_peak: int  # of the forward pass up to the last tensor that it saves, where checkpointing stops it
    backward_peak: int  # saved tensors and gradients together, the incoming gradient included
    in_flight: int  # of that peak, the gradient of a weight
    kept_peak: int  # as backward_peak, were gradients of weights kept where they are made
    gradients_before_first_read: int  # alive when the backward pass first asks for something saved
    weight_gradients: int  # of all trainable weights, were they kept


@dataclass(eq=False)
class Tape:
    """Records a program."""

    nodes: list[_Node] = field(default_factory=list)

    def input(self, elements: int, width: int, *, needs_grad: bool) -> Value:
        return Value(elements, width, needs_grad)

    def op(
        self,
        inputs: tuple[Value, ...],
        elements: int,
        width: int,
        *,
        saved: tuple[Value, ...] = (),
        saves_output: bool = False,
        extra_saved: int = 0,
        forward_temp: int = 0,
        backward_temp: int = 0,
        weight_gradient: int = 0,
        passes_gradient: bool = False,
        reads_weight: bool = False,
    ) -> Value:
        """Records one operation; returns its output. ``extra_saved`` bytes are made and kept by it alone."""
        needs_grad = weight_gradient > 0 or any(value.needs_grad for value in inputs)
        output = Value(elements, width, needs_grad)
        if needs_grad:
            kept = (
                saved + ((output,) if saves_output else ()) + ((Value(extra_saved, 1, False),) if extra_saved else ())
            )
        else:
            kept = ()
        reads_weight = reads_weight and needs_grad
        self.nodes.append(
            _Node(inputs, output, kept, forward_temp, backward_temp, weight_gradient, passes_gradient, reads_weight)
        )
        return output

    def view(self, source: Value, elements: int | None = None) -> Value:
        """Another look at the same storage; its gradient is passed on without a copy."""
        output = Value(source.elements if elements is None else elements, source.width, source.needs_grad, source.owner)
        self.nodes.append(_Node((source,), output, (), 0, 0, 0, True, False))
        return output

    def keep_until_here(self, *values: Value) -> None:
        """The calling function's frame holds these until the operation recorded last is over."""
        self.nodes[-1].also_read += values

    def cast(self, source: Value, width: int) -> Value:
        if source.width == width:
            return source
        return self.op((source,), source.elements, width)

    def add(self, left: Value, right: Value) -> Value:
        return self.op(
            (left, right), left.elements, max(left.width, right.width), passes_gradient=left.width == right.width
        )

    def product(self, left: Value, right: Value, width: int | None = None) -> Value:
        """Each factor is kept for the other's gradient, if that is asked for."""
        saved = (left,) * right.needs_grad + (right,) * left.needs_grad
        return self.op((left, right), left.elements, width or max(left.width, right.width), saved=saved)

    def run(self, *, held: tuple[Value, ...] = (), output_gradient: bool = True) -> Footprint:
        """Plays the program. ``held`` values stay referenced until the backward pass is over."""
        return _Player(self.nodes, held).play(output_gradient)


class _Player:
    def __init__(self, nodes: list[_Node], held: tuple[Value, ...]) -> None:
        self.nodes = nodes
        self.alive = 0
        self.peak = 0
        self.in_flight = 0
        self.kept_peak = 0
        self.made_gradients = 0  # of weights
        self.references: dict[Value, int] = {}
        self.held = held
        self.gradients: dict[Value, Value] = {}
        self.recomputation_peak = 0
        self.before_first_read: int | None = None
        self.made = {node.output.owner for node in nodes}
        self.sources = {value.owner for node in nodes for value in node.inputs} - self.made

    def play(self, output_gradient: bool) -> Footprint:
        self._forward()
        forward_peak, retained = self.peak, self.alive
        saved_input = sum(value.bytes for value in self.references if value not in self.made and value in self.sources)
        self.peak = self.kept_peak = self.alive
        self.in_flight = 0
        self._backward(output_gradient)
        return Footprint(
            retained=retained,
            saved_input=saved_input,
            forward_peak=forward_peak,
            recomputation_peak=self.recomputation_peak,
            backward_peak=self.peak,
            in_flight=self.in_flight,
            kept_peak=self.kept_peak,
            gradients_before_first_read=self.before_first_read or 0,
            weight_gradients=self.made_gradients,
        )

    def _hold(self, storage: Value) -> None:
        count = self.references.get(storage, 0)
        if count == 0:
            self.alive += storage.bytes
        self.references[storage] = count + 1

    def _release(self, storage: Value) -> None:
        count = self.references[storage] - 1
        if count == 0:
            self.alive -= storage.bytes
            del self.references[storage]
        else:
            self.references[storage] = count

    def _see(self, temporary: int = 0, weight_gradient: int = 0) -> None:
        now = self.alive + temporary + weight_gradient
        self.kept_peak = max(self.kept_peak, now + self.made_gradients)
        if now > self.peak:
            self.peak, self.in_flight = now, weight_gradient

    def _readers(self) -> dict[Value, int]:
        readers: dict[Value, int] = {}
        for values in (*((*node.inputs, *node.also_read) for node in self.nodes), self.held):
            for value in values:
                readers[value.owner] = readers.get(value.owner, 0) + 1
        return readers

    def _forward(self) -> None:
        readers = self._readers()
        last_saving = next((node for node in reversed(self.nodes) if node.asks_for_saved), None)
        for node in self.nodes:
            if node is last_saving:
                self.recomputation_peak = self.peak
            is_view = node.output.storage is not None
            reads = 0 if is_view else readers.get(node.output, 0)
            for _ in range(reads):
                self._hold(node.output)
            self._see(node.forward_temp + (0 if reads or is_view else node.output.bytes))
            for value in node.saved:
                self._hold(value.owner)
            self._see()
            if node is last_saving and not node.saves_inputs_only:
                self.recomputation_peak = self.peak
            for value in (*node.inputs, *node.also_read):
                if value.owner in self.made:
                    self._release(value.owner)

    def _backward(self, output_gradient: bool) -> None:
        retained = self.alive
        last = self.nodes[-1].output
        if output_gradient and last.needs_grad:
            self._give(last, Value(last.elements, last.width, False))
        for node in reversed(self.nodes):
            gradient = self.gradients.pop(node.output, None)
            if self.before_first_read is None and node.asks_for_saved:
                self.before_first_read = self.alive - retained
            if gradient is not None:
                self._step(node, gradient)
            for value in node.saved:
                self._release(value.owner)
            if gradient is not None:
                self._release(gradient)

    def _step(self, node: _Node, gradient: Value) -> None:
        """All gradients that a step gives are there together with what it was given and had saved."""
        self._see(node.backward_temp)
        given: list[tuple[Value, Value]] = []
        for value in node.inputs:
            if not value.needs_grad:
                continue
            own = gradient if node.passes_gradient else Value(value.elements, value.width, False)
            self._hold(own)
            given.append((value, own))
        self._see(node.backward_temp, node.weight_gradient)
        self.made_gradients += node.weight_gradient
        for value, own in given:
            if value in self.gradients:
                self._release(own)  # added in place
            else:
                self.gradients[value] = own

    def _give(self, value: Value, gradient: Value) -> None:
        self._hold(gradient)
        self.gradients[value] = gradient
        self._see()
