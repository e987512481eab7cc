# SPDX-License-Identifier: Apache-2.0
"""What must hold of any estimate, whatever is trained and however.

Totals are compared where batches keep their length: where they do not, fragmentation goes by the logits at
the moment of the peak, and that moment may change.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from deepspeed_provider.errors import SpecError
from deepspeed_provider.sizing import estimate as sizing
from deepspeed_provider.sizing.activations import moments
from deepspeed_provider.sizing.architecture import Architecture
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.estimate import MemoryEstimate
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.gpu import mode
from deepspeed_provider.sizing.options import (
    Attention,
    Loss,
    Method,
    Offload,
    OffloadDevice,
    Optimizer,
    Padding,
    Precision,
    QuantStorage,
    TrainingOptions,
    parse_options,
)
from deepspeed_provider.sizing.weights import weights
from hypothesis import assume, given, settings
from hypothesis import strategies as st

MODELS = (
    "HuggingFaceTB/SmolLM2-135M",
    "meta-llama/Llama-2-7b-hf",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen3-8B",
    "google/gemma-2-2b",
    "google/gemma-3-1b-pt",
    "microsoft/phi-2",
    "microsoft/Phi-3-mini-4k-instruct",
    "tiiuae/falcon-7b",
    "tiiuae/falcon-40b",
    "openai-community/gpt2",
    "facebook/opt-350m",
    "bigscience/bloom-560m",
    "mosaicml/mpt-7b",
    "EleutherAI/pythia-1b",
    "allenai/OLMo-2-1124-7B",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen1.5-MoE-A2.7B",
    "Qwen/Qwen3-30B-A3B",
)
STATES = (
    "weights",
    "adapter_weights",
    "unquantized_weights",
    "quantized_weights",
    "gradients",
    "master_weights",
    "optimizer_states",
)
# From nothing to everything off the GPU.
OFFLOADS = (Offload.NONE, Offload.OPTIMIZER, Offload.ALL)


@cache
def model(name: str) -> Architecture:
    return architecture(model_config(name))


def estimate(name: str, options: TrainingOptions) -> MemoryEstimate:
    return sizing.estimate(model(name), options)


def choices(kind):
    return st.sampled_from(list(kind))


@st.composite
def trainings(draw, **fixed):
    """(name of the model, options) that are possible together."""
    values = {
        "method": draw(choices(Method)),
        "precision": draw(choices(Precision)),
        "optimizer": draw(choices(Optimizer)),
        "zero_stage": draw(st.integers(0, 3)),
        "offload": draw(choices(Offload)),
        "offload_device": draw(choices(OffloadDevice)),
        "gpus_per_node": draw(st.integers(1, 8)),
        "nodes": draw(st.integers(1, 4)),
        "micro_batch_size": draw(st.integers(1, 8)),
        "sequence_length": draw(st.integers(16, 4096)),
        "gradient_accumulation_steps": draw(st.sampled_from((1, 1, 4))),
        "gradient_checkpointing": draw(st.booleans()),
        "attention": draw(choices(Attention)),
        "loss": draw(choices(Loss)),
        "padding": draw(choices(Padding)),
        "holds_outputs": draw(st.booleans()),
        "lora_rank": draw(st.integers(1, 256)),
        "lora_targets": draw(st.sampled_from(("all-linear", "q,k,v,o", "q,k,v"))),
        "lora_dropout": draw(st.sampled_from((0.0, 0.05))),
        "double_quant": draw(st.booleans()),
        "quant_storage": draw(choices(QuantStorage)),
        "upcast_unquantized": draw(st.booleans()),
        "reduce_bucket_size": draw(st.sampled_from((None, 500_000_000))),
        "overlap_comm": draw(st.sampled_from((None, False, True))),
    } | fixed
    return draw(st.sampled_from(MODELS)), possible(values)


def possible(values) -> TrainingOptions:
    try:
        return parse_options(values)
    except SpecError:
        assume(False)
        raise


def otherwise(options: TrainingOptions, **changes) -> TrainingOptions:
    return possible(options.model_dump() | changes)


def states(found: MemoryEstimate) -> int:
    return sum(found.gpu.part(name) for name in STATES)


quick = settings(max_examples=60)


@quick
@given(trainings())
def test_parts_add_up_and_none_is_negative(training):
    found = estimate(*training)
    sizes = {part.name: part.bytes for part in found.gpu.parts}
    assert len(sizes) == len(found.gpu.parts)
    assert all(size > 0 for size in sizes.values())
    outside = sizes.get("cuda_context", 0) + sizes.get("nccl", 0)
    assert found.gpu.total_bytes == sum(sizes.values())
    assert found.gpu.reserved_bytes == found.gpu.total_bytes - outside
    assert found.gpu.allocated_bytes == found.gpu.reserved_bytes - sizes.get("fragmentation", 0)
    for store in (found.host, found.nvme):
        assert all(part.bytes > 0 for part in store.parts)
        assert store.total_bytes == sum(part.bytes for part in store.parts)


def largest_tensor(shape: Architecture) -> int:
    """Elements."""
    matrices = (linear.weights for layer in shape.layers for linear in layer.linears)
    return max(shape.token_embedding_parameters, *matrices)


def padding(options: TrainingOptions) -> int:
    """Flat copies of weights, gradients and states are padded to 2 elements for each rank."""
    return 4 * 2 * 4 * options.world_size


@quick
@given(trainings(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_multiplying_gpus_never_needs_more_memory_each(training, stage, times_gpus, times_nodes):
    """Multiples, whose partitions lie in the fewer GPUs' ones: a gradient that reaches into a partition is kept
    whole, and other cuts may meet more of them. From two GPUs on: one alone neither communicates nor gathers."""
    name, options = training
    options = otherwise(options, zero_stage=stage, gpus_per_node=max(2, options.gpus_per_node))
    more = otherwise(options, gpus_per_node=options.gpus_per_node * times_gpus, nodes=options.nodes * times_nodes)
    few, many = estimate(name, options).gpu, estimate(name, more).gpu
    if options.padding is Padding.MAX_LENGTH:
        assert many.total_bytes <= few.total_bytes + padding(more)
    assert many.allocated_bytes <= few.allocated_bytes + padding(more)


@quick
@given(trainings(), st.integers(2, 8))
def test_the_second_gpu_never_raises_model_states(training, gpus):
    name, options = training
    alone = otherwise(options, gpus_per_node=1, nodes=1, gradient_accumulation_steps=2)
    more = otherwise(alone, gpus_per_node=gpus)
    assert states(estimate(name, more)) <= states(estimate(name, alone)) + padding(more)


@quick
@given(trainings(gradient_accumulation_steps=2, offload="none"), st.integers(2, 8))
def test_a_higher_stage_never_raises_model_states(training, gpus):
    """With accumulation all gradients are there at any moment, so that the moment of the peak does not matter.

    ZeRO makes a copy of the weights for its optimizer even where training without it has none, and stage 2
    one of the gradients that it has: alone on one GPU, it only adds. Stage 2 keeps whole each gradient that
    reaches into a GPU's partition, so one tensor more than half of all, twice.
    """
    name, options = training
    options = otherwise(options, gpus_per_node=gpus)
    found = [estimate(name, otherwise(options, zero_stage=stage)) for stage in range(4)]
    sizes = [states(each) for each in found]
    if not found[0].gpu.part("master_weights"):
        sizes[0] += found[1].gpu.part("master_weights")
    shared = 2 * 4 * largest_tensor(model(name))
    for lower, higher in pairwise(sizes):
        assert higher <= lower + padding(options) + shared


@quick
@given(trainings(gradient_accumulation_steps=2), st.integers(1, 3))
def test_more_offload_never_raises_model_states(training, stage):
    name, options = training
    fits = OFFLOADS if stage == 3 else OFFLOADS[:2]
    device = options.offload_device if stage == 3 else OffloadDevice.CPU
    sizes = [
        states(estimate(name, otherwise(options, zero_stage=stage, offload=offload, offload_device=device)))
        for offload in fits
    ]
    for less, more in pairwise(sizes):
        assert more <= less


@quick
@given(trainings())
def test_checkpointing_never_raises_activations(training):
    """At their highest; at the first layer, where there are least, it can: that layer's input wants a gradient then."""
    name, options = training
    how = mode(model(name), weights(model(name), options), options)
    with_it, without = (
        max(moment.activation_bytes for moment in moments(model(name), how, checkpointing=checkpointing))
        for checkpointing in (True, False)
    )
    assert with_it <= without


@quick
@given(trainings(), st.integers(1, 4))
def test_a_larger_micro_batch_never_needs_less(training, more):
    name, options = training
    few = estimate(name, options)
    many = estimate(name, otherwise(options, micro_batch_size=options.micro_batch_size + more))
    assert many.gpu.allocated_bytes >= few.gpu.allocated_bytes
    if options.padding is Padding.MAX_LENGTH:
        assert many.gpu.total_bytes >= few.gpu.total_bytes


@quick
@given(trainings(), st.integers(1, 2048))
def test_a_longer_sequence_never_needs_less(training, more):
    name, options = training
    short = estimate(name, options)
    long = estimate(name, otherwise(options, sequence_length=options.sequence_length + more))
    assert long.gpu.allocated_bytes >= short.gpu.allocated_bytes
    if options.padding is Padding.MAX_LENGTH:
        assert long.gpu.total_bytes >= short.gpu.total_bytes


@quick
@given(trainings(), st.sampled_from((Method.LORA, Method.QLORA)), st.integers(1, 128))
def test_a_lower_rank_never_needs_more(training, method, more):
    """Without persistence, which keeps small adapters whole on each GPU and divides larger ones."""
    name, options = training
    low = otherwise(options, method=method, stage3_param_persistence_threshold=0)
    high = otherwise(low, lora_rank=low.lora_rank + more)
    smaller, larger = estimate(name, low), estimate(name, high)
    assert smaller.gpu.allocated_bytes <= larger.gpu.allocated_bytes
    if options.padding is Padding.MAX_LENGTH:
        assert smaller.gpu.total_bytes <= larger.gpu.total_bytes
    assert smaller.parameters.trainable < larger.parameters.trainable


@quick
@given(trainings(method=Method.QLORA))
def test_quantising_twice_never_needs_more(training):
    name, options = training
    twice, once = (estimate(name, otherwise(options, double_quant=double)).gpu for double in (True, False))
    assert twice.allocated_bytes <= once.allocated_bytes
