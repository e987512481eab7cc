# SPDX-License-Identifier: Apache-2.0
"""Each part's formula, computed with the numbers that are printed beside it, is the part's bytes."""

from __future__ import annotations

import ast
import math
import operator
import re
from fractions import Fraction

import pytest
from deepspeed_provider.sizing.options import TrainingOptions, parse_options
from deepspeed_provider.sizing.parts import Part
from hypothesis import given, settings
from hypothesis import strategies as st
from sizing.test_properties import MODELS, estimate, otherwise, trainings

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
FUNCTIONS = {"ceil": math.ceil, "min": min, "max": max}
PRINTED = re.compile(r"(\w+) = (-?[\d,]*\d(?:\.\d+)?(?:e[-+]?\d+)?)(?:, |$)")


def value(node: ast.AST, numbers: dict[str, Fraction]) -> Fraction:
    """Exactly; anything but arithmetic is refused."""
    match node:
        case ast.Expression(body=body):
            return value(body, numbers)
        case ast.Constant(value=int() | float() as number):
            return Fraction(number)
        case ast.Name(id=name):
            return numbers[name]
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](value(left, numbers), value(right, numbers))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return Fraction(FUNCTIONS[name](*(value(each, numbers) for each in arguments)))
    raise AssertionError(f"no arithmetic: {ast.dump(node)}")


def computed(part: Part) -> tuple[Fraction, int]:
    """(value of the printed formula, number of divisions in it); every printed number is used."""
    text = part.explained()
    formula, _, printed = text.partition(" [")
    numbers = {name: Fraction(digits.replace(",", "")) for name, digits in PRINTED.findall(printed.removesuffix("]"))}
    assert numbers.keys() == part.numbers.keys(), text
    tree = ast.parse(formula, mode="eval")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - FUNCTIONS.keys()
    assert used == numbers.keys(), text
    return value(tree, numbers), sum(isinstance(node, ast.Div) for node in ast.walk(tree))


def check(name: str, options: TrainingOptions) -> None:
    found = estimate(name, options)
    for memory in (found.gpu.parts, found.host.parts, found.host.at_other_moments, found.nvme.parts):
        for part in memory:
            result, divisions = computed(part)
            # A share of what moves is rounded to whole bytes.
            roundings = max(divisions, int(part.name == "fragmentation"))
            assert abs(result - part.bytes) <= roundings, f"{part.name}: {part.explained()} is not {part.bytes:,}"
            assert part.source, part.name


@settings(max_examples=250)
@given(trainings(), st.sampled_from((1_000_000_000, 50_000_000, 10_000)), st.booleans())
def test_any_estimate(training, sub_group_size, load_in_turn):
    name, options = training
    check(name, otherwise(options, sub_group_size=sub_group_size, load_in_turn=load_in_turn))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param({}, id="full, alone"),
        pytest.param({"gpus_per_node": 3}, id="full, stage 0"),
        pytest.param({"zero_stage": 1, "gpus_per_node": 3}, id="stage 1"),
        pytest.param({"zero_stage": 2, "gpus_per_node": 3, "gradient_accumulation_steps": 2}, id="stage 2"),
        pytest.param({"zero_stage": 3, "gpus_per_node": 7}, id="stage 3"),
        pytest.param({"zero_stage": 2, "gpus_per_node": 3, "offload": "optimizer"}, id="stage 2, offload"),
        pytest.param({"zero_stage": 3, "gpus_per_node": 3, "offload": "all"}, id="stage 3, offload"),
        pytest.param(
            {"zero_stage": 3, "gpus_per_node": 3, "offload": "all", "offload_device": "nvme"}, id="stage 3, NVMe"
        ),
        pytest.param({"optimizer": "adamw-8bit", "zero_stage": 1, "gpus_per_node": 3}, id="8-bit"),
        pytest.param({"optimizer": "paged-adamw-8bit", "zero_stage": 1, "gpus_per_node": 3}, id="paged"),
        pytest.param({"method": "lora", "attention": "eager", "gradient_checkpointing": False}, id="LoRA"),
        pytest.param({"method": "lora", "padding": "longest", "loss": "fused"}, id="LoRA, changing lengths"),
        pytest.param({"method": "qlora", "double_quant": False}, id="QLoRA"),
        pytest.param({"method": "qlora", "zero_stage": 3, "gpus_per_node": 3}, id="QLoRA, stage 3"),
        pytest.param(
            {"method": "qlora", "zero_stage": 3, "gpus_per_node": 3, "offload": "all"}, id="QLoRA, stage 3, offload"
        ),
        pytest.param(
            {"method": "qlora", "zero_stage": 3, "gpus_per_node": 3, "offload": "all", "quant_storage": "uint8"},
            id="QLoRA, stage 3, uint8, offload",
        ),
    ],
)
def test_every_kind_of_estimate(model, case):
    check(model, parse_options({"sequence_length": 333, **case}))
