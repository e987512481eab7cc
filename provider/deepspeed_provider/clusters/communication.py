# SPDX-License-Identifier: Apache-2.0
"""Seconds that ZeRO's collectives take, by stage.

Volumes are those of the ZeRO paper (Rajbhandari et al. 2020, section 7): a ring moves (n-1)/n of a tensor past
each GPU to gather or to reduce-scatter it, twice that to all-reduce it.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_provider.clusters.calibration import Calibration
from deepspeed_provider.clusters.hardware import Hardware
from deepspeed_provider.sizing.options import TrainingOptions
from deepspeed_provider.sizing.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Seconds of one optimizer step: beside the computation, and while it waits."""

    overlapped: float
    waited: float


def ring_seconds(size_bytes: float, hardware: Hardware, calibration: Calibration, *, collectives: float = 1) -> float:
    """To gather or reduce-scatter so many bytes in so many collectives; the slower kind of link counts.

    The ring enters and leaves each node once, so a node's network carries what each GPU's link carries.
    """
    ranks = hardware.world_size
    if ranks == 1 or not size_bytes:
        return 0.0
    inside = hardware.intra_node_bytes_per_second if hardware.gpus_per_node > 1 else float("inf")
    between = hardware.inter_node_bytes_per_second if hardware.nodes > 1 else float("inf")
    rate = min(inside, between) * calibration.network
    return size_bytes * (ranks - 1) / ranks / rate + collectives * calibration.collective_seconds


def communication(
    num_layers: int, found: Weights, options: TrainingOptions, hardware: Hardware, calibration: Calibration
) -> Streams:
    """Of one optimizer step."""
    gradients = float(found.trained * found.widths.gradient)
    trained = float(found.trained * found.widths.weight)
    micro_steps = options.gradient_accumulation_steps

    def ring(size: float, collectives: float) -> float:
        return ring_seconds(size, hardware, calibration, collectives=collectives)

    if options.zero_stage == 3:
        # Parameters are gathered before each layer, forward and backward; its gradients go to their owners.
        step = 2 * ring(whole_weights(found), num_layers) + ring(gradients, num_layers)
        return Streams(overlapped=micro_steps * step, waited=0.0)
    buckets = 1 + found.trained // options.allgather_bucket_size if options.allgather_bucket_size else 1
    reduce = ring(gradients, buckets)
    if options.zero_stage == 0:
        return Streams(overlapped=0.0, waited=2 * reduce)
    # Stage 1 keeps whole gradients and reduces them once a step; stage 2 after each micro-step.
    reduce *= micro_steps if options.zero_stage == 2 else 1
    gather = ring(trained, buckets)
    if options.overlaps:
        return Streams(overlapped=reduce, waited=gather)
    return Streams(overlapped=0.0, waited=reduce + gather)


def whole_weights(found: Weights) -> float:
    """Bytes of one copy of all weights as the GPUs hold them."""
    return float(found.trained * found.widths.weight + found.frozen * found.frozen_width + found.quantized_bytes)
