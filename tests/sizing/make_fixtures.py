# SPDX-License-Identifier: Apache-2.0
"""Random training steps for the fake-tensor oracle, and what it counts for them, kept as JSON.

``python -m sizing.make_fixtures`` (with ``tests`` on the path; a few minutes) writes ``data/oracle.json``.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed_provider.sizing.catalogue import model_config, model_names
from deepspeed_provider.sizing.families import architecture
from deepspeed_provider.sizing.lora import adapters
from sizing.case import Case

VERSION = 1
SEED = 20261130
FIXTURES = Path(__file__).parent / "data" / "oracle.json"

# CPU kernels of dropout keep other things than CUDA's.
DROPOUTS = (
    "attention_dropout",
    "hidden_dropout",
    "embedding_dropout",
    "residual_dropout",
    "resid_dropout",
    "embed_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
    "activation_dropout",
)
WAYS = (("full", True), ("full", False), ("lora", True), ("lora", False), ("qlora", True))
TARGETS = ("all-linear", "all-linear", "q,v", "q,k,v,o", "up,down", "o,down")
# Of mixtures of experts PEFT adapts fused parameters, by all names or none.
EXPERT_TARGETS = ("all-linear", "q,v", "q,k,v,o")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")


def kinds() -> dict[str, tuple[str, ...]]:
    """Kind of architecture -> the catalogue's models of it."""
    found: dict[str, list[str]] = {}
    for name in model_names():
        config = model_config(name)
        found.setdefault(_kind(config), []).append(name)
    return {kind: tuple(found[kind]) for kind in KINDS}


def _kind(config: dict[str, Any]) -> str:
    if config["model_type"] == "falcon":
        return "falcon-new" if config.get("new_decoder_architecture") else "falcon"
    if config["model_type"] == "opt" and config.get("do_layer_norm_before") is False:
        return "opt-post-norm"
    return str(config["model_type"])


def cases(seed: int = SEED, *, rounds: int = 1) -> Iterator[Case]:
    """Each kind of architecture trained in each way, everything else at random."""
    dice = random.Random(seed)
    models = kinds()
    for _ in range(rounds):
        for kind in KINDS:
            for method, checkpointing in WAYS:
                if method == "qlora" and kind in EXPERTS:
                    continue  # the model code refuses it
                yield _case(dice, kind, models[kind], method, checkpointing)


def _case(dice: random.Random, kind: str, models: tuple[str, ...], method: str, checkpointing: bool) -> Case:
    config = model_config(dice.choice(models)) if dice.random() < 0.6 else KINDS[kind](dice)
    if dice.random() < 0.5:
        config["vocab_size"] = dice.choice((1_000, 2_000))  # else the logits hide what the layers need
    config |= dict.fromkeys(DROPOUTS, 0.0) | {"pad_token_id": 0}
    config[next(name for name in LAYERS if name in config)] = dice.randint(2, 8)
    sequence_length = min(dice.choice((128, 256, 512, 1024, 2048, dice.randint(128, 2048))), _positions(config))
    targets = dice.choice(EXPERT_TARGETS if kind in EXPERTS else TARGETS)
    if targets != "all-linear":
        targets = list(adapters(architecture(config), rank=1, targets=targets).names)
    return Case(
        config=config,
        method=method,
        micro_batch_size=dice.choice((1, 1, 2, 3, 4, 8)),
        sequence_length=sequence_length,
        gradient_checkpointing=checkpointing,
        gradients_freed=dice.random() < 0.5,
        lora_rank=dice.choice((4, 8, 16, 64, 128)),
        lora_targets=targets,
        double_quant=dice.random() < 0.5,
    )


def _positions(config: dict[str, Any]) -> int:
    return int(config.get("n_positions") or config.get("max_position_embeddings") or 2048)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    width: int
    vocabulary: int


def _shape(dice: random.Random) -> _Shape:
    heads, head_dim = dice.choice((4, 8, 12, 16)), dice.choice((32, 64, 80, 128))
    hidden = heads * head_dim
    return _Shape(
        hidden=hidden,
        heads=heads,
        key_value_heads=heads // dice.choice((1, 2, 4)),
        head_dim=head_dim,
        width=dice.choice((2, 3, 4)) * hidden,
        vocabulary=dice.choice((1_000, 8_000, 32_000, 50_257, 100_000)),
    )


def _gated(model_type: str, **more: Any) -> Any:
    def make(dice: random.Random) -> dict[str, Any]:
        shape = _shape(dice)
        return {
            "model_type": model_type,
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.width,
            "num_hidden_layers": 2,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.key_value_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": dice.random() < 0.5,
            **more,
        }

    return make


def _experts(model_type: str, **more: Any) -> Any:
    gated = _gated(model_type, **more)

    def make(dice: random.Random) -> dict[str, Any]:
        count, width = dice.choice((4, 8, 16)), dice.choice((128, 256, 512))
        chosen = {"num_local_experts": count, "num_experts": count, "num_experts_per_tok": dice.choice((1, 2, 4))}
        return gated(dice) | chosen | {"moe_intermediate_size": width}

    return make


def _phi(dice: random.Random) -> dict[str, Any]:
    config = _gated("phi")(dice)
    return config | {"partial_rotary_factor": dice.choice((0.25, 0.5)), "tie_word_embeddings": False}


def _gpt_neox(dice: random.Random) -> dict[str, Any]:
    shape = _shape(dice)
    return {
        "model_type": "gpt_neox",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "num_hidden_layers": 2,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": 2048,
        "rotary_pct": dice.choice((0.25, 1.0)),
        "use_parallel_residual": dice.random() < 0.5,
    }


def _gpt2(dice: random.Random) -> dict[str, Any]:
    shape = _shape(dice)
    sizes = {"n_embd": shape.hidden, "n_head": shape.heads, "n_layer": 2, "n_positions": 1024}
    return {"model_type": "gpt2", "vocab_size": shape.vocabulary, **sizes}


def _opt(*, before: bool) -> Any:
    def make(dice: random.Random) -> dict[str, Any]:
        shape = _shape(dice)
        return {
            "model_type": "opt",
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "ffn_dim": shape.width,
            "num_hidden_layers": 2,
            "num_attention_heads": shape.heads,
            "word_embed_proj_dim": shape.hidden if before else shape.hidden // 2,
            "do_layer_norm_before": before,
            "max_position_embeddings": 2048,
        }

    return make


def _falcon(*, new: bool) -> Any:
    def make(dice: random.Random) -> dict[str, Any]:
        shape = _shape(dice)
        return {
            "model_type": "falcon",
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": shape.heads,
            "num_kv_heads": shape.key_value_heads if new else 1,
            "multi_query": not new,
            "new_decoder_architecture": new,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
        }

    return make


KINDS = {
    "llama": _gated("llama"),
    "mistral": _gated("mistral"),
    "qwen2": _gated("qwen2"),
    "qwen3": _gated("qwen3"),
    "gemma": _gated("gemma", tie_word_embeddings=True),
    "gemma3_text": _gated("gemma3_text", tie_word_embeddings=True, sliding_window=4096),
    "phi": _phi,
    "phi3": _gated("phi3"),
    "falcon": _falcon(new=False),
    "falcon-new": _falcon(new=True),
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "opt": _opt(before=True),
    "opt-post-norm": _opt(before=False),
    "starcoder2": _gated("starcoder2"),
    "olmo2": _gated("olmo2"),
    "mixtral": _experts("mixtral"),
    "qwen2_moe": _experts("qwen2_moe", shared_expert_intermediate_size=512),
    "qwen3_moe": _experts("qwen3_moe"),
}
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")}


def read() -> dict[str, Any]:
    """{"generator": {"version", "seed"}, "versions": of the libraries counted, "cases": [{"case", "counted"}]}."""
    found: dict[str, Any] = json.loads(FIXTURES.read_text(encoding="utf-8"))
    return found


def write() -> None:
    """One case a line."""
    from sizing.oracle import peak_bytes

    head = {"generator": {"version": VERSION, "seed": SEED}, "versions": versions()}
    lines = []
    for case in cases():
        lines.append(json.dumps({"case": dataclasses.asdict(case), "counted": peak_bytes(case)}))
        print(len(lines), case.label, file=sys.stderr, flush=True)
    text = json.dumps(head)[:-1] + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n"
    FIXTURES.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
