# SPDX-License-Identifier: Apache-2.0
"""The whole plan: what follows from the choice agrees with what was counted."""

from __future__ import annotations

import json

import pytest
from databricks.sdk.service import compute
from deepspeed_provider.clusters.candidate import candidate
from deepspeed_provider.clusters.engine_settings import engine_settings, with_buckets
from deepspeed_provider.clusters.gpu_plan import gpu_plan
from deepspeed_provider.clusters.job import Constraints, Job, Objective
from deepspeed_provider.clusters.node_types import Cloud, node_types
from deepspeed_provider.clusters.runtimes import runtime
from deepspeed_provider.clusters.settings import layouts
from deepspeed_provider.clusters.wire import plan_as_json
from deepspeed_provider.deepspeed_config.check import check
from deepspeed_provider.deepspeed_config.findings import Facts
from deepspeed_provider.deepspeed_config.schema import schema
from deepspeed_provider.errors import SpecError
from deepspeed_provider.sizing.catalogue import model_config
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.options import Attention, Method, Offload, Optimizer, QuantStorage, parse_options
from hypothesis import given, settings
from hypothesis import strategies as st

JOBS = {
    "small, full": ("gpt2", {}, 10**8),
    "7B, full": ("llama-2-7b-hf", {}, 10**8),
    "7B, LoRA": ("llama-2-7b-hf", {"method": "lora", "sequence_length": 4096}, 10**8),
    "13B, QLoRA": ("llama-2-13b-hf", {"method": "qlora", "lora_rank": 64}, 10**8),
    "70B, full": ("llama-2-70b-hf", {}, 10**9),
    "MoE, LoRA": ("Mixtral-8x7B-v0.1", {"method": "lora", "attention": "flash"}, 10**8),
}


def job(model: str, options: dict, tokens: int = 10**8, batch: int = 64) -> Job:
    return Job(
        architecture=architecture(model_config(model)),
        options=parse_options(options),
        tokens=tokens,
        effective_batch_size=batch,
    )


@pytest.fixture(scope="module", params=JOBS, ids=list(JOBS))
def plan(request):
    return gpu_plan(job(*JOBS[request.param]), node_types(), Constraints(clouds=frozenset([Cloud.AWS])))


def test_the_checker_accepts_the_configuration(plan):
    best = plan.choice.best
    facts = Facts(
        world_size=best.options.world_size,
        method=best.options.method,
        use_gpu=True,
        bf16=best.node_type.gpu.bf16,
        has_disk=best.node_type.nvme_bytes > 0,
        has_libaio=True,
    )
    assert check(plan.deepspeed_config, facts) == []


def test_the_configuration_has_the_buckets_that_were_counted(plan):
    options, zero = plan.choice.best.options, plan.deepspeed_config["zero_optimization"]
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        assert zero.get(name, getattr(options, name)) == getattr(options, name)
    assert zero["stage"] == options.zero_stage
    assert plan.deepspeed_config["train_batch_size"] == plan.job.effective_batch_size


def test_configuration_and_cluster_are_for_the_same_ranks(plan):
    best = plan.choice.best
    assert engine_settings(best).batch.world_size == best.nodes * best.node_type.gpus
    assert plan.cluster["num_workers"] == (best.nodes if best.nodes > 1 else 0)
    assert plan.cluster["node_type_id"] == best.node_type.node_type_id


def test_every_node_type_is_in_the_table_or_refused(plan):
    shown = {found.node_type.node_type_id for found in plan.choice.candidates}
    refused = {one.node_type_id for one in plan.refused}
    assert shown | refused == {node.node_type_id for node in node_types()}
    assert not shown & refused
    assert all(one.reason for one in plan.refused)


def test_it_is_json(plan):
    said = json.loads(json.dumps(plan_as_json(plan), allow_nan=False))
    assert said["chosen"] == said["candidates"][0]
    assert said["chosen"]["price_date"]
    assert said["chosen"]["region"] == "us-east-1"
    assert said["nearest_miss"] is None
    assert [one["usd"] for one in said["candidates"]] == sorted(one["usd"] for one in said["candidates"])
    for one in said["candidates"]:
        memory = one["memory"]
        for name in ("gpu", "host", "nvme"):
            assert memory[f"{name}_bytes"] <= memory[f"{name}_capacity_bytes"]


def test_packages_that_no_runtime_has_are_named(plan):
    method = plan.job.options.method
    text = " ".join(plan.warnings)
    assert ("peft" in text) == (method is not Method.FULL)
    assert ("bitsandbytes" in text) == (method is Method.QLORA)


@pytest.mark.parametrize("optimizer", Optimizer)
@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("alone", [True, False], ids=["one GPU", "several"])
def test_only_adamw_has_layouts_with_offload(method, optimizer, alone):
    found = layouts(method, alone=alone, has_nvme=True, optimizer=optimizer)
    assert found
    offloads = any(layout.offload is not Offload.NONE for layout in found)
    assert offloads == (optimizer is Optimizer.ADAMW)


@pytest.mark.parametrize("optimizer", [kind for kind in Optimizer if kind is not Optimizer.ADAMW])
def test_no_configuration_offloads_what_cannot_step_on_the_cpu(optimizer):
    found = job("gpt2", {"optimizer": optimizer})
    (kind,) = (one for one in node_types() if one.named("g5.12xlarge"))
    for_adamw = layouts(Method.FULL, alone=False, has_nvme=False, optimizer=Optimizer.ADAMW)
    layout = next(one for one in for_adamw if one.offload is Offload.OPTIMIZER)
    with pytest.raises(SpecError, match=f"optimizer = '{optimizer}'.*only Adam on the CPU.*Use adamw"):
        engine_settings(candidate(found, kind, 1, layout, 1, spot=False))


@pytest.mark.parametrize("optimizer", Optimizer)
def test_a_training_that_is_not_ours_is_named(optimizer):
    plan = gpu_plan(job("gpt2", {"optimizer": optimizer}), node_types(), Constraints(clouds=frozenset([Cloud.AWS])))
    other = optimizer is not Optimizer.ADAMW
    assert any(f"never {optimizer}: this plan is for a training of your own" in text for text in plan.warnings) == other
    assert any(f"The states of {optimizer} stay on the GPUs" in text for text in plan.assumptions) == other


def test_what_offloads_is_priced_by_unmeasured_rates(plan):
    offloads = plan.choice.best.options.offload is not Offload.NONE
    assert any("offloaded states" in text and "not measured" in text for text in plan.warnings) == offloads


def test_one_that_offloads_says_so():
    limits = Constraints(node_type_ids=frozenset(["g5.48xlarge"]), max_nodes=1)
    plan = gpu_plan(job("llama-2-13b-hf", {}), node_types(), limits)
    assert plan.choice.best.options.offload is not Offload.NONE
    assert any("offloaded states" in text for text in plan.warnings)


def test_the_runtimes_older_deepspeed_is_named(plan):
    found = runtime(plan.cluster["spark_version"])
    assert found.deepspeed != schema().version
    (text,) = (text for text in plan.warnings if "holds DeepSpeed" in text)
    for part in (found.spark_version, found.deepspeed, found.date, f"deepspeed=={schema().version}"):
        assert part in text


def test_nothing_fits():
    limits = Constraints(clouds=frozenset([Cloud.AWS]), max_nodes=1, node_type_ids=frozenset(["g5.xlarge"]))
    plan = gpu_plan(job("llama-2-70b-hf", {}), node_types(), limits)
    assert plan.choice.best is None
    assert plan.deepspeed_config is None
    assert plan.cluster is None
    said = plan_as_json(plan)
    assert said["chosen"] is None
    assert said["candidates"] == []
    assert said["nearest_miss"]["node_type_id"] == "g5.xlarge"
    assert said["nearest_miss"]["missing_bytes"] > 0


def test_what_would_make_it_fit():
    limits = Constraints(clouds=frozenset([Cloud.AWS]), max_nodes=1, node_type_ids=frozenset(["g5.2xlarge"]))
    helps = gpu_plan(job("llama-2-7b-hf", {}), node_types(), limits).would_fit
    assert any(text.startswith("method qlora (g5.2xlarge x 1: $") for text in helps)


def test_a_workspace_restricts_the_search():
    answer = {
        "node_types": [
            {"node_type_id": "g5.12xlarge", "num_gpus": 4},
            {"node_type_id": "p9.huge", "num_gpus": 8},
        ]
    }
    plan = gpu_plan(job("gpt2", {}), node_types(), Constraints(), workspace=answer)
    assert {found.node_type.node_type_id for found in plan.choice.candidates} == {"g5.12xlarge"}
    reasons = {one.node_type_id: one.reason for one in plan.refused}
    assert reasons["p4d.24xlarge"] == "not in this workspace"
    (unknown,) = [text for text in plan.warnings if "p9.huge" in text]
    # A row cannot name a GPU that is not packaged.
    assert "adds one whose GPU `deepspeed-provider catalog show --gpus` lists" in unknown


def test_spot_says_what_may_happen():
    limits = Constraints(clouds=frozenset([Cloud.GCP]), spot=True, min_nodes=2)
    plan = gpu_plan(job("gpt2", {}), node_types(), limits, objective=Objective.TIME)
    text = " ".join(plan.warnings)
    assert "taken away" in text
    assert "Spot machines may be taken away" in text
    assert plan.cluster["gcp_attributes"]["availability"] == "PREEMPTIBLE_WITH_FALLBACK_GCP"


@pytest.mark.parametrize("method", Method)
def test_buckets_never_exceed_what_is_trained(method):
    found = architecture(model_config("llama-2-7b-hf"))
    options = with_buckets(found, parse_options({"method": method.value, "lora_rank": 1, "lora_targets": "q"}))
    assert options.reduce_bucket_size == options.allgather_bucket_size
    assert options.reduce_bucket_size <= 4096 * 4096
    assert (options.reduce_bucket_size < 4096 * 4096) == (method is not Method.FULL)


IDS = tuple(node.node_type_id for node in node_types())
OPTIONS = st.fixed_dictionaries(
    {
        "method": st.sampled_from(Method),
        "optimizer": st.sampled_from(Optimizer),
        "sequence_length": st.sampled_from([512, 2048, 8192]),
        "attention": st.sampled_from(Attention),
        "lora_rank": st.sampled_from([1, 64]),
        "quant_storage": st.sampled_from(QuantStorage),
    }
)


@settings(max_examples=60)
@given(
    model=st.sampled_from([model for model, *_ in JOBS.values()]),
    options=OPTIONS,
    batch=st.sampled_from([8, 64, 96, 512]),
    ids=st.sets(st.sampled_from(IDS), min_size=1, max_size=6),
    max_nodes=st.sampled_from([1, 4, 8]),
    objective=st.sampled_from(Objective),
    spot=st.booleans(),
)
def test_whatever_is_chosen_fits_is_accepted_and_can_be_asked_for(
    model, options, batch, ids, max_nodes, objective, spot
):
    limits = Constraints(node_type_ids=frozenset(ids), max_nodes=max_nodes, spot=spot)
    plan = gpu_plan(job(model, options, batch=batch), node_types(), limits, objective=objective, top=1)
    best = plan.choice.best
    if best is None:
        assert plan.cluster is plan.deepspeed_config is None
        return
    memory, room = best.memory, limits.headroom
    assert memory.gpu.total_bytes <= best.node_type.gpu.memory_bytes * (1 - room.gpu)
    assert memory.host.total_bytes <= best.node_type.ram_bytes * (1 - room.host)
    assert memory.nvme.total_bytes <= best.node_type.nvme_bytes * (1 - room.nvme)
    facts = Facts(
        world_size=best.options.world_size,
        method=best.options.method,
        use_gpu=True,
        bf16=best.node_type.gpu.bf16,
        has_disk=best.node_type.nvme_bytes > 0,
        has_libaio="init_scripts" in plan.cluster,
        trained_parameters=memory.parameters.trainable,
    )
    assert check(plan.deepspeed_config, facts) == []
    assert options["optimizer"] is Optimizer.ADAMW or best.options.offload is Offload.NONE
    assert compute.ClusterSpec.from_dict(plan.cluster).as_dict() == plan.cluster
