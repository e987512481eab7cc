# SPDX-License-Identifier: Apache-2.0
"""Totals without parts are the parts' totals, to the byte."""

from __future__ import annotations

from deepspeed_provider.sizing.gpu import mode
from deepspeed_provider.sizing.options import Precision, TrainingOptions
from deepspeed_provider.sizing.totals import GpuTotals, activations
from deepspeed_provider.sizing.weights import weights
from hypothesis import given, settings
from hypothesis import strategies as st
from sizing.test_properties import estimate, model, otherwise, trainings

thorough = settings(max_examples=150)


def total(name: str, options: TrainingOptions, totals: GpuTotals) -> int:
    found = weights(model(name), options)
    how = mode(model(name), found, options)
    moments = activations(model(name), how, checkpointing=options.gradient_checkpointing)
    return totals.total_bytes(moments, accumulates=options.gradient_accumulation_steps > 1)


@thorough
@given(trainings(), st.integers(1, 16), st.integers(1, 4))
def test_one_object_gives_the_total_of_every_micro_batch(training, micro_batch_size, steps):
    name, options = training
    totals = GpuTotals(model(name), weights(model(name), options), options)
    other = otherwise(options, micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps)
    for asked in (options, other):
        assert total(name, asked, totals) == estimate(name, asked).gpu.total_bytes
        assert totals.least_bytes <= total(name, asked, totals)


@thorough
@given(trainings())
def test_checkpointing_leaves_the_states_as_they_are(training):
    name, options = training
    other = otherwise(options, gradient_checkpointing=not options.gradient_checkpointing)
    found = weights(model(name), options)
    twin = GpuTotals(model(name), found, options)
    assert total(name, other, GpuTotals(model(name), found, other, twin)) == estimate(name, other).gpu.total_bytes


@thorough
@given(trainings(gradient_accumulation_steps=2), st.integers(2, 4))
def test_memory_never_falls_when_the_micro_batch_grows(training, times):
    name, options = training
    larger = otherwise(options, micro_batch_size=times * options.micro_batch_size)
    assert estimate(name, larger).gpu.total_bytes >= estimate(name, options).gpu.total_bytes


@thorough
@given(trainings(), st.integers(1, 8), st.integers(1, 4))
def test_gpus_of_a_node_or_of_several_need_the_same(training, gpus_per_node, nodes):
    name, options = training
    spread = otherwise(options, gpus_per_node=gpus_per_node, nodes=nodes)
    together = otherwise(options, gpus_per_node=gpus_per_node * nodes, nodes=1)
    assert estimate(name, spread).gpu == estimate(name, together).gpu


@thorough
@given(trainings(precision="bf16"))
def test_half_precisions_take_the_same_bytes(training):
    name, options = training
    found, other = estimate(name, options), estimate(name, otherwise(options, precision=Precision.FP16))
    assert (found.gpu, found.host, found.nvme) == (other.gpu, other.host, other.nvme)
