# SPDX-License-Identifier: Apache-2.0
"""The numbers of the throughput model that no data sheet gives, in one place.

The first five are fitted to the published throughput of MPT models (docs/throughput.md says how an
estimate does on a GPU that the fit has not seen); the others come from the source beside each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All of them.

    Attributes:
        matmul: what products in a model reach of the best product on that GPU (``Gpu.matmul_share``):
            their shapes are not the best ones.
        flash: what the flash kernel inside a model reaches of what its authors print, counting the whole
            square of scores.
        activation_passes: how often forward and backward together move each input and output of each
            linear through the GPU's memory: products, norms, activations, residuals.
        logits_bytes: moved per logit, forward and backward, by a loss that reads them once in 16 bits.
        exposed: share of overlapped communication that still costs time: it takes memory bandwidth and
            multiprocessors from the products, and the first and last pieces have nothing to hide behind.
        network: share of a link that ring collectives reach on one layer's parameters (NCCL's own tests
            reach 0.7 to 0.9, but on payloads of gigabytes). The table cannot tell it from ``exposed``: any
            value from 0.3 to 0.7 fits as well, with another share exposed.
        sdpa: speed of the memory-efficient kernel relative to the flash kernel (FlashAttention-2, figure 4).
        score_bytes: moved per attention score by eager attention: written, masked, turned to fp32 for
            the softmax and back, read, and as often again in the backward pass.
        launches_per_layer, launches_per_adapter: kernels that one layer, and one LoRA adapter in it, start in a
            forward pass of transformers' eager code: norms, positions, residuals beside the products. A backward
            pass starts twice as many.
        launch_seconds: the host's time for each, Python included; a floor under small batches. With
            ``hook_seconds`` set by the runs of 256 tokens in Qwen's table (docs/throughput.md).
        hook_seconds: ZeRO stage 3's Python hooks around each module, for one layer in one micro-step.
        collective_seconds: latency of one collective, all ranks' kernels started and joined.
        pcie: share of PCIe's rate that pinned copies reach.
        cpu_adam_parameters_per_second: per core (hyper-thread), DeepSpeed's CPU Adam, which the RAM's
            bandwidth limits: 10 billion parameters in 2.57 s on 96 (ZeRO-Offload, table 4).
        nvme_read, nvme_write: bytes per second for each byte of drive: drives come in cards of about one
            TB with one controller each (p4d: 8 TB, 16 GB/s).
            Taken to hold below one TB too: clouds limit parts of a card to their share of its rate.
        nvme_assumed_bytes: what a node without a known drive is taken to have.
    """

    matmul: float
    flash: float
    activation_passes: float
    logits_bytes: float
    exposed: float
    network: float = 0.5
    sdpa: float = 0.55
    score_bytes: float = 48
    launches_per_layer: float = 35
    launches_per_adapter: float = 6
    launch_seconds: float = 17e-6
    hook_seconds: float = 8e-3
    collective_seconds: float = 40e-6
    pcie: float = 0.8
    cpu_adam_parameters_per_second: float = 40e6
    nvme_read: float = 2e9 / 1e12
    nvme_write: float = 1e9 / 1e12
    nvme_assumed_bytes: float = 1e12


CALIBRATION: Final = Calibration(matmul=0.92, flash=0.82, activation_passes=10.6, logits_bytes=47, exposed=0.6)

# What the flash kernel's authors reach of the 16-bit peak: FlashAttention-2 on A100 (Dao 2023), and the same kernel
# on H100, whose newer instructions it does not use (FlashAttention-3, Shah et al. 2024).
FLASH_SHARE: Final = 0.73
FLASH_SHARE_HOPPER: Final = 0.35
A100_MATMUL_SHARE: Final = 0.869
