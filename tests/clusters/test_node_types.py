# SPDX-License-Identifier: Apache-2.0
"""The packaged node types against the facts they were made from, the traps in these, a user's own rows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from deepspeed_provider.clusters.gpus import GIB, GIGA
from deepspeed_provider.clusters.node_type import OWN_PRICE, PriceDoubt
from deepspeed_provider.clusters.node_types import (
    Cloud,
    NodeType,
    Support,
    Tier,
    node_types,
    usd_per_dbu,
    with_overrides,
)
from deepspeed_provider.errors import SpecError

FACTS = Path(__file__).parent / "data" / "gpu_catalog.csv"
SUPPORT = {
    "docs": Support.SUPPORTED,
    "dbu-table-only": Support.DBU_ONLY,
    "deprecated": Support.RETIRED,
    "no-evidence": Support.NO_EVIDENCE,
}
SPOT_ONLY = {"a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g"}


def facts() -> list[dict[str, str]]:
    with FACTS.open(newline="") as lines:
        return list(csv.DictReader(lines))


def node_type(name: str) -> NodeType:
    (found,) = (node for node in node_types() if node.named(name))
    return found


def test_one_row_for_each_fact():
    assert [node.node_type_id for node in node_types()] == [row["node_type_id"] for row in facts()]
    assert len({node.node_type_id.casefold() for node in node_types()}) == 80


@pytest.mark.parametrize("fact", facts(), ids=lambda fact: fact["node_type_id"])
def test_facts_carry_over(fact):
    node = node_type(fact["node_type_id"])
    assert node.cloud == fact["cloud"]
    assert node.gpus == int(fact["gpus"])
    assert node.gpu.name.startswith(fact["gpu_model"].replace(" ", "-"))
    assert node.gpu.memory_bytes < float(fact["vram_gb_per_gpu"]) * GIB
    assert node.gpu.memory_bytes > 0.88 * float(fact["vram_gb_per_gpu"]) * GIGA
    assert ".".join(map(str, node.gpu.compute_capability)) == fact["compute_capability"]
    assert node.gpu.bf16 == (fact["bf16_native"] == "yes")
    assert (node.region, node.price_date) == (fact["reference_region"], fact["price_date"])
    assert node.support == (
        Support.RETIRED if fact["node_type_id"].startswith("p3") else SUPPORT[fact["databricks_support"]]
    )


@pytest.mark.parametrize("fact", facts(), ids=lambda fact: fact["node_type_id"])
def test_numbers_carry_over_where_they_were_found(fact):
    node = node_type(fact["node_type_id"])
    on_demand = "" if fact["node_type_id"] in SPOT_ONLY else fact["on_demand_usd_per_hour"]
    pairs = [
        (fact["vcpus"], node.cores),
        (fact["ram_gb"], node.ram_bytes / GIB),
        (fact["local_nvme_gb"] or "0", node.nvme_bytes / GIGA),
        (fact["inter_node_network"].partition(" ")[0], node.network_bytes_per_second * 8 / GIGA),
        (fact["dbu_per_hour_jobs"], node.dbu_per_hour),
        (on_demand, node.on_demand_usd_per_hour),
        (fact["spot_usd_per_hour"], node.spot_usd_per_hour),
    ]
    for printed, kept in pairs:
        if printed:
            assert kept == pytest.approx(float(printed))
    for printed, kept in pairs[4:]:
        assert bool(printed) == (kept is not None)


@pytest.mark.parametrize("node", node_types(), ids=lambda node: node.node_type_id)
def test_a_row_can_be_true(node):
    assert node.gpus in (1, 2, 4, 8, 16)
    assert 2 <= node.cores / node.gpus <= 64
    assert 8 * GIB <= node.ram_bytes / node.gpus < 1024 * GIB
    assert 2 <= node.network_bytes_per_second * 8 / GIGA <= 3200
    link = node.intra_node_bytes_per_second
    assert link <= (node.gpu.nvlink_bytes_per_second or node.gpu.pcie_bytes_per_second)
    assert node.source
    if node.launchable:
        assert node.priced() or node.priced(spot=True)
    if node.priced() and node.launchable:
        assert 0.5 < node.usd_per_hour() / node.gpus < 20
    if node.priced(spot=True) and node.priced():
        assert node.usd_per_hour(spot=True) < node.usd_per_hour()


@pytest.mark.parametrize(
    ("name", "usd"),
    [("p5.48xlarge", 68.38), ("p4d.24xlarge", 28.63), ("Standard_NC24ads_A100_v4", 6.673)],
)
def test_a_node_costs_the_machine_and_its_units(name, usd):
    assert node_type(name).usd_per_hour() == pytest.approx(usd, abs=0.01)


@pytest.mark.parametrize(
    ("cloud", "tier", "usd"),
    [
        (Cloud.AWS, Tier.PREMIUM, 0.15),
        (Cloud.AWS, Tier.ENTERPRISE, 0.20),
        (Cloud.AZURE, Tier.PREMIUM, 0.30),
        (Cloud.AZURE, Tier.ENTERPRISE, 0.30),
        (Cloud.GCP, Tier.ENTERPRISE, 0.20),
    ],
)
def test_a_unit_costs_by_cloud_and_tier(cloud, tier, usd):
    assert usd_per_dbu(cloud, tier) == usd
    assert {node.usd_per_dbu for node in node_types(tier=tier) if node.cloud is cloud} == {usd}


def test_a_price_that_was_not_found_is_no_price():
    assert not node_type("Standard_ND40rs_v2").priced()
    with pytest.raises(ValueError, match=r"Standard_ND40rs_v2 has no known on-demand price"):
        node_type("Standard_ND40rs_v2").usd_per_hour()
    with pytest.raises(ValueError, match="no known spot price"):
        node_type("p4d.24xlarge").usd_per_hour(spot=True)


# the traps in the facts


def test_parts_of_an_a10_are_no_rows():
    assert not [node for node in node_types() if node.gpu.name == "A10" and node.cores < 36]


@pytest.mark.parametrize(
    ("name", "gpus"),
    [("Standard_NC48ads_A100_v4", 2), ("Standard_NC96ads_A100_v4", 4), ("Standard_ND96isr_H100_v5", 8)],
)
def test_counts_that_some_sources_print_wrong(name, gpus):
    assert node_type(name).gpus == gpus


@pytest.mark.parametrize(("name", "cores"), [("g6.12xlarge", 48), ("a3-highgpu-2g", 52), ("a3-highgpu-8g", 208)])
def test_cores_that_one_source_prints_wrong(name, cores):
    assert node_type(name).cores == cores


def test_retired_families_are_there_and_never_launchable():
    retired = {node.node_type_id for node in node_types() if node.support is Support.RETIRED}
    assert retired == {
        "p3.2xlarge",
        "p3.8xlarge",
        "p3.16xlarge",
        "p3dn.24xlarge",
        "Standard_NC6s_v3",
        "Standard_NC12s_v3",
        "Standard_NC24s_v3",
        "Standard_NC24rs_v3",
    }
    assert not any(node.launchable for node in node_types() if node.support in (Support.RETIRED, Support.NO_EVIDENCE))


def test_every_family_of_the_article():
    families = {
        "T4": {"g4dn.xlarge", "Standard_NC4as_T4_v3"},
        "V100-16GB": {"p3.2xlarge", "Standard_NC6s_v3"},
        "V100-32GB": {"p3dn.24xlarge", "Standard_ND40rs_v2"},
        "A10G": {"g5.xlarge"},
        "A10": {"Standard_NV36ads_A10_v5"},
        "A100-40GB": {"p4d.24xlarge", "Standard_ND96asr_v4"},
        "A100-80GB": {"p4de.24xlarge", "Standard_ND96amsr_A100_v4"},
        "H100": {"p5.48xlarge", "Standard_ND96isr_H100_v5"},
    }
    for name, ids in families.items():
        assert {node_type(found).gpu.name for found in ids} == {name}


def test_azure_nc_series_has_a_poor_network():
    poor = {node.node_type_id for node in node_types() if node.poor_network}
    assert poor == {node.node_type_id for node in node_types() if node.node_type_id.startswith("Standard_NC")}
    assert len(poor) == 13


def test_gcp_g2_units_follow_the_cores():
    for node in node_types():
        if node.node_type_id.startswith("g2-"):
            assert node.dbu_per_hour == pytest.approx(0.36 * node.cores)


def test_small_a3_is_sold_as_spot_only():
    for name in SPOT_ONLY:
        assert not node_type(name).priced()
        assert node_type(name).priced(spot=True)
        assert "spot or flex-start only" in node_type(name).notes


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("standard_nd96isr_h100_V5", "Standard_ND96isr_H100_v5"),
        ("Standard_NC80ads_H100_V5", "Standard_NC80adis_H100_v5"),
        ("P4D.24xlarge", "p4d.24xlarge"),
    ],
)
def test_ids_in_any_case_and_other_spellings(name, found):
    assert node_type(name).node_type_id == found


def test_gpus_on_half_a_slot_meet_at_half_the_rate():
    assert node_type("g5.12xlarge").intra_node_bytes_per_second == node_type("g5.xlarge").gpu.pcie_bytes_per_second / 2


# a user's own rows

NEW = {
    "cloud": "aws",
    "node_type_id": "p5en.48xlarge",
    "gpu": "H200",
    "gpus": "8",
    "cores": 192,
    "ram_gib": 2048,
    "network_gbps": 3200,
    "dbu_per_hour": 100,
    "on_demand_usd_per_hour": 60,
    "region": "us-west-2",
    "price_date": "2026-11-01",
}


def test_a_negotiated_price():
    changed = with_overrides(
        node_types(), [{"cloud": "AWS", "node_type_id": "P5.48xlarge", "on_demand_usd_per_hour": "40", "gpus": ""}]
    )
    (node,) = (node for node in changed if node.named("p5.48xlarge"))
    assert node.node_type_id == "p5.48xlarge"
    assert node.usd_per_hour() == pytest.approx(40 + 88.9096 * 0.15)
    assert [node for node in changed if not node.named("p5.48xlarge")] == [
        node for node in node_types() if not node.named("p5.48xlarge")
    ]


OWN = {"cloud": "aws", "node_type_id": "p5.48xlarge"}
DBU, ELSEWHERE = PriceDoubt.LISTED_DBU, PriceDoubt.OTHER_REGION


@pytest.mark.parametrize(
    ("row", "date", "doubts"),
    [
        ({"on_demand_usd_per_hour": 40}, OWN_PRICE, {DBU}),
        ({"on_demand_usd_per_hour": 40, "price_date": "2026-11-01"}, "2026-11-01", {DBU}),
        ({"spot_usd_per_hour": 9, "usd_per_dbu": 0.1}, OWN_PRICE, set()),
        ({"usd_per_dbu": 0.1}, OWN_PRICE, set()),
        ({"cores": 100}, None, set()),
        ({"region": "eu-west-1"}, None, {DBU, ELSEWHERE}),
        ({"region": "eu-west-1", "on_demand_usd_per_hour": 50}, OWN_PRICE, {DBU}),
        ({"region": "eu-west-1", "on_demand_usd_per_hour": 50, "usd_per_dbu": 0.2}, OWN_PRICE, set()),
    ],
    ids=["price", "dated", "spot and DBU", "DBU", "no price", "only a region", "region and price", "region and all"],
)
def test_whose_price_it_is(row, date, doubts):
    (listed,) = (node for node in node_types() if node.named("p5.48xlarge"))
    region = row.get("region", listed.region)
    found = {node.region: node for node in with_overrides(node_types(), [OWN | row]) if node.named("p5.48xlarge")}
    assert set(found) == {listed.region, region}
    node = found[region]
    assert node.price_date == (date or listed.price_date)
    assert node.price_doubts == doubts


def test_later_rows_settle_doubts():
    rows = [OWN | {"region": "eu-west-1"}, OWN | {"on_demand_usd_per_hour": 50}, OWN | {"usd_per_dbu": 0.2}]
    for count, doubts in enumerate([set(), {DBU, ELSEWHERE}, {DBU}, set()]):
        named = [node for node in with_overrides(node_types(), rows[:count]) if node.named("p5.48xlarge")]
        assert named[-1].price_doubts == doubts


def test_a_new_type_needs_no_date_with_its_price():
    undated = {name: value for name, value in NEW.items() if name != "price_date"}
    node = with_overrides(node_types(), [undated])[-1]
    assert (node.price_date, node.price_doubts) == (OWN_PRICE, {DBU})


def test_a_new_type():
    changed = with_overrides(node_types(), [NEW])
    assert changed[:-1] == node_types()
    assert changed[-1].intra_node_bytes_per_second == 450e9
    assert changed[-1].support is Support.SUPPORTED
    assert changed[-1].usd_per_hour() == pytest.approx(60 + 100 * 0.15)


def test_two_rows_for_one_type_both_count():
    changed = with_overrides(
        node_types(),
        [NEW, {**NEW, "gpus": 4}, {"cloud": "aws", "node_type_id": NEW["node_type_id"], "usd_per_dbu": 0.1}],
    )
    assert len(changed) == 81
    assert (changed[-1].gpus, changed[-1].usd_per_dbu) == (4, 0.1)


def test_another_region_is_one_more_place():
    rows = [OWN | {"region": "eu-west-1", "on_demand_usd_per_hour": 70}, OWN | {"region": "eu-west-2"}]
    rows += [OWN | {"region": "eu-west-1", "spot_usd_per_hour": 9}, OWN | {"usd_per_dbu": 0.1}]
    (listed,) = (node for node in node_types() if node.named("p5.48xlarge"))
    found = [node for node in with_overrides(node_types(), rows) if node.named("p5.48xlarge")]
    assert [(node.region, node.on_demand_usd_per_hour, node.spot_usd_per_hour) for node in found] == [
        (listed.region, listed.on_demand_usd_per_hour, None),
        ("eu-west-1", 70, 9),
        ("eu-west-2", listed.on_demand_usd_per_hour, None),
    ]
    assert {node.usd_per_dbu for node in found} == {0.1}
    assert {(node.gpus, node.ram_bytes) for node in found} == {(listed.gpus, listed.ram_bytes)}


def test_a_wrong_row_for_several_regions_is_told_once():
    with pytest.raises(SpecError) as caught:
        with_overrides(node_types(), [OWN | {"region": "eu-west-1"}, OWN | {"cores": 0}])
    assert len(caught.value.problems) == 1


def test_another_gpu_brings_its_own_links():
    row = {"cloud": "aws", "node_type_id": "g5.12xlarge", "gpu": "H200"}
    (node,) = (node for node in with_overrides(node_types(), [row]) if node.named("g5.12xlarge"))
    assert node.intra_node_bytes_per_second == 450e9


def test_rows_that_say_nothing_change_nothing():
    rows = [{"cloud": node.cloud, "node_type_id": node.node_type_id, "gpu": ""} for node in node_types()]
    assert with_overrides(node_types(tier=Tier.ENTERPRISE), rows) == node_types(tier=Tier.ENTERPRISE)


def test_all_problems_of_all_rows_at_once():
    rows = [
        {**NEW, "gpu": "H300", "gpus": 0},
        {"cloud": "aws", "node_type_id": "g5.xlarge", "on_demand_usd": 1},
        {"cloud": "aws", "node_type_id": "g5.2xlarge", "spot_usd_per_hour": -1},
        {"cloud": "ibm", "node_type_id": "x"},
        {**NEW, "node_type_id": "free", "on_demand_usd_per_hour": None, "dbu_per_hour": None},
        {**NEW, "node_type_id": "Standard_NV6ads_A10_v5", "cloud": "azure", "gpu": "A10", "gpus": 1},
        {**NEW, "node_type_id": "late", "price_date": "yesterday"},
    ]
    with pytest.raises(SpecError) as caught:
        with_overrides(node_types(), rows)
    fields = {problem.field for problem in caught.value.problems}
    assert {
        "p5en.48xlarge.gpus",
        "g5.xlarge.on_demand_usd",
        "g5.2xlarge.spot_usd_per_hour",
        "x.cloud",
        "x.gpu",
        "free.dbu_per_hour",
        "free.on_demand_usd_per_hour",
        "Standard_NV6ads_A10_v5.gpus",
        "late.price_date",
    } <= fields
    assert "Did you mean 'on_demand_usd_per_hour'?" in str(caught.value)
    assert "a sixth of an A10" in str(caught.value)


def test_an_unknown_gpu_in_a_row():
    with pytest.raises(SpecError, match=r"p5en\.48xlarge\.gpu = 'H300'.*Nearest: H200"):
        with_overrides(node_types(), [{**NEW, "gpu": "H300"}])
