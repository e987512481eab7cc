# SPDX-License-Identifier: Apache-2.0
"""Programs small enough to count by hand."""

from __future__ import annotations

import pytest
from deepspeed_provider.sizing.tape import Tape

N = 100  # elements
HALF = 2  # bytes
FULL = 4


@pytest.fixture
def tape() -> Tape:
    return Tape()


def test_what_is_read_once_lives_until_then(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    first = tape.op((x,), N, HALF)
    tape.op((first,), N, HALF)
    found = tape.run()
    assert found.retained == 0
    # The first's output and the second's; the second's is then nobody's.
    assert found.forward_peak == 2 * N * HALF
    # The gradient that comes in, and the one that goes out.
    assert found.backward_peak == 2 * N * HALF


def test_saved_tensors_stay(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    square = tape.op((x,), N, HALF, saved=(x,))
    tape.op((square,), N, HALF, saves_output=True, extra_saved=7)
    found = tape.run()
    assert found.saved_input == N * HALF
    assert found.retained == N * HALF + N * HALF + 7
    # The last step has its saved output, the 7 bytes and the saved input with two gradients.
    assert found.backward_peak == found.retained + 2 * N * HALF


def test_nothing_is_saved_where_no_gradient_is_asked_for(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=False)
    tape.op((tape.op((x,), N, HALF, saved=(x,)),), N, HALF, saves_output=True, extra_saved=7, reads_weight=True)
    found = tape.run()
    assert (found.retained, found.backward_peak, found.gradients_before_first_read) == (0, 0, 0)


def test_a_product_keeps_only_what_the_other_factor_needs(tape: Tape) -> None:
    frozen = tape.op((tape.input(N, HALF, needs_grad=False),), N, HALF)
    trained = tape.op((tape.input(N, HALF, needs_grad=True),), N, HALF)
    tape.product(frozen, trained)
    assert tape.run().retained == N * HALF
    both = Tape()
    x = both.input(N, HALF, needs_grad=True)
    both.product(both.op((x,), N, HALF), both.op((x,), N, HALF))
    assert both.run().retained == 2 * N * HALF


def test_gradients_of_one_tensor_are_added_in_place(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    y = tape.op((x,), N, HALF)
    left, right = tape.op((y,), N, HALF), tape.op((y,), N, HALF)
    tape.add(left, right)
    # An addition passes its gradient on to both sides, uncopied. The right step makes a second one, the
    # left step a third, which is added to the second and freed.
    assert tape.run().backward_peak == 3 * N * HALF


def test_an_addition_of_two_widths_copies_for_the_narrow_side(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    total = tape.add(tape.op((x,), N, HALF), tape.op((x,), N, FULL))
    assert total.width == FULL
    # Coming in 4 bytes, one copy each of 2 and of 4.
    assert tape.run().backward_peak == N * (FULL + HALF + FULL)


def test_a_view_takes_no_memory_and_passes_its_gradient(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    y = tape.op((x,), N, HALF, saves_output=True)
    tape.view(tape.view(y))
    found = tape.run()
    assert found.retained == found.forward_peak == N * HALF
    assert found.backward_peak == N * HALF + 2 * N * HALF


def test_a_view_that_is_saved_keeps_its_source(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    part = tape.view(tape.op((x,), 2 * N, HALF), N)
    tape.op((part,), N, HALF, saved=(part,))
    assert tape.run().retained == 2 * N * HALF


def test_a_cast_to_the_same_width_is_no_copy(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    assert tape.cast(x, HALF) is x
    wide = tape.cast(x, FULL)
    assert (wide.elements, wide.width, wide.needs_grad) == (N, FULL, True)
    assert tape.run().forward_peak == N * FULL


def test_held_values_outlive_their_last_reader(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    logits = tape.op((x,), N, HALF)
    tape.op((logits,), 1, FULL)
    assert tape.run().retained == 0
    assert tape.run(held=(logits,)).retained == N * HALF


def test_a_frame_keeps_its_values_until_it_returns(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    early = tape.op((x,), N, HALF)
    middle = tape.op((early,), N, HALF)
    last = tape.op((middle,), N, HALF)
    assert tape.run().forward_peak == 2 * N * HALF
    tape.keep_until_here(early)
    tape.op((last,), 1, HALF)
    assert tape.run().forward_peak == 3 * N * HALF


def test_temporaries_count_only_while_they_are_used(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    tape.op((x,), N, HALF, forward_temp=1000, backward_temp=3000)
    found = tape.run()
    assert found.retained == 0
    assert found.forward_peak == N * HALF + 1000
    assert found.backward_peak == 2 * N * HALF + 3000


def test_a_weights_gradient_is_in_flight_once(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    y = tape.op((x,), N, HALF, saved=(x,), weight_gradient=5000)
    tape.op((y,), N, HALF, saved=(y,), weight_gradient=6000)
    found = tape.run()
    assert found.weight_gradients == 11_000
    assert found.in_flight == 6000
    # Freed as soon as made: both inputs, two gradients, the larger weight's.
    assert found.backward_peak == 4 * N * HALF + 6000
    # Kept: at the earlier operation one saved input, two gradients, both weights'.
    assert found.kept_peak == 3 * N * HALF + 11_000


def test_a_trained_weight_needs_no_gradient_of_its_input(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=False)
    y = tape.op((x,), N, HALF, saved=(x,), weight_gradient=50)
    assert y.needs_grad
    found = tape.run()
    assert found.retained == found.saved_input == N * HALF
    assert found.backward_peak == N * HALF + N * HALF + 50


def test_a_recomputation_stops_where_the_last_tensor_is_saved(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    y = tape.op((x,), N, HALF, saved=(x,))
    z = tape.op((y,), N, FULL, saved=(y,))
    tape.op((z,), N, FULL, forward_temp=9000)
    found = tape.run()
    # Inputs are put aside before the operation runs: neither its output nor anything later is made again.
    assert found.recomputation_peak == 2 * N * HALF
    assert found.forward_peak == 2 * N * HALF + 2 * N * FULL + 9000
    # By then the last operation's gradient has come in and gone out.
    assert found.gradients_before_first_read == N * FULL


def test_a_recomputation_that_ends_with_a_saved_output_makes_it(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    tape.op((tape.op((x,), N, HALF, saves_output=True),), N, FULL)
    assert tape.run().recomputation_peak == N * HALF


def test_a_frozen_weight_is_asked_for_as_saved_tensors_are(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    frozen = tape.op((x,), N, HALF, reads_weight=True)
    tape.cast(frozen, FULL)
    assert tape.run().gradients_before_first_read == N * HALF


def test_a_loss_starts_without_a_gradient(tape: Tape) -> None:
    x = tape.input(N, HALF, needs_grad=True)
    tape.op((x,), 1, FULL, saved=(x,))
    assert tape.run(output_gradient=False).backward_peak == N * HALF
    assert tape.run().backward_peak == N * HALF + N * HALF + FULL
