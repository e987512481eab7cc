# SPDX-License-Identifier: Apache-2.0
"""What a training installs on a runtime, and where it runs at all."""

from __future__ import annotations

import pytest
from deepspeed_provider.clusters.libraries import libraries, require_training, task_libraries
from deepspeed_provider.clusters.runtimes import runtimes
from deepspeed_provider.errors import SpecError

TRAINED_ON = [found for found in runtimes() if found.spark_version >= "16.4"]


def test_every_row_has_its_source_and_a_known_runtime():
    keys = {found.spark_version for found in runtimes()}
    for library in libraries():
        assert library.spark_version in keys
        assert library.source
        assert library.date


@pytest.mark.parametrize("found", TRAINED_ON, ids=lambda found: found.spark_version)
def test_a_runtime_that_the_training_runs_on_has_a_pinned_peft_for_lora(found):
    require_training(found.spark_version, "spark_version")
    (library,) = task_libraries(found.spark_version, "lora")
    assert library["pypi"]["package"].startswith("peft==")
    assert task_libraries(found.spark_version, "full") == []


@pytest.mark.parametrize("key", [found.spark_version for found in runtimes() if found not in TRAINED_ON])
def test_others_are_refused_with_one_that_works(key):
    with pytest.raises(SpecError, match=r"17\.3\.x|has no DeepSpeed"):
        require_training(key, "plan.cluster.spark_version")
    assert task_libraries(key, "lora") == []


def test_a_runtime_that_is_not_known_gets_nothing():
    assert task_libraries("99.9.x-gpu-ml-scala2.13", "lora") == []
    with pytest.raises(SpecError, match="is no GPU runtime for machine learning that is known"):
        require_training("99.9.x-gpu-ml-scala2.13", "spark_version")
