# SPDX-License-Identifier: Apache-2.0
"""GPUs by name, and whether each row of the table can be true."""

from __future__ import annotations

import pytest
from deepspeed_provider.clusters.gpus import GIB, gpu, gpus
from deepspeed_provider.errors import SpecError

# By name, in GB: what a process gets is always a little less.
MARKETED_GB = {
    "T4": 16,
    "V100-16GB": 16,
    "V100-32GB": 32,
    "A10": 24,
    "A10G": 24,
    "L4": 24,
    "L40S": 48,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "A100-80GB-PCIe": 80,
    "H100": 80,
    "H100-NVL": 94,
    "H200": 141,
}


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("T4", "T4"),
        ("tesla t4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("a10", "A10"),
        ("A100-40GB", "A100-40GB"),
        ("a100_80gb", "A100-80GB"),
        ("A100 80 GB", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("V100-32GB", "V100-32GB"),
        ("H100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100-nvl", "H100-NVL"),
        ("L40S", "L40S"),
        ("h200", "H200"),
    ],
)
def test_a_name_in_any_spelling(spelling, name):
    assert gpu(spelling).name == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("A100", "could be any of several GPUs. Nearest: A100-40GB, A100-80GB"),
        ("V100", "could be any of several GPUs. Nearest: V100-16GB, V100-32GB"),
        ("H300", "is not in the GPU catalogue. Nearest: H200, H100"),
        ("L40", "is not in the GPU catalogue. Nearest: L40S"),
        ("MI300X", "is not in the GPU catalogue"),
        ("", "is not in the GPU catalogue. Known: T4"),
    ],
)
def test_an_unknown_or_ambiguous_name_gets_the_nearest(name, said):
    with pytest.raises(SpecError) as caught:
        gpu(name)
    assert said in str(caught.value)
    assert caught.value.problems[0].field == "gpu"


def test_every_gpu_is_there():
    assert {found.name for found in gpus()} == set(MARKETED_GB)


@pytest.mark.parametrize("found", gpus(), ids=lambda found: found.name)
def test_a_row_can_be_true(found):
    assert 0.88 * MARKETED_GB[found.name] * 10**9 < found.memory_bytes < MARKETED_GB[found.name] * GIB
    assert found.bf16 == (found.compute_capability >= (8, 0))
    assert found.dense_flops_fp32 < found.dense_flops_16bit < 1e15, "peaks are without sparsity"
    assert 0.3 < found.matmul_share < 0.9
    assert found.pcie_bytes_per_second < found.memory_bytes_per_second
    assert found.nvlink_bytes_per_second == 0 or found.nvlink_bytes_per_second > found.pcie_bytes_per_second
    assert found.source
    assert found.matmul_source
    assert found.date == "2026-11-30"


def test_what_the_names_share_differs():
    assert gpu("A10G").dense_flops_16bit < gpu("A10").dense_flops_16bit
    assert gpu("A100-40GB").memory_bytes_per_second < gpu("A100-80GB").memory_bytes_per_second
    assert gpu("A100-80GB-PCIe").nvlink_bytes_per_second == 0
