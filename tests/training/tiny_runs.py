# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama, a tiny data set, and real two-rank runs of them under torchrun."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from deepspeed_provider.training.plan import (
    EvaluationSettings,
    MethodSettings,
    ModelSettings,
    OptimizationSettings,
    TrackingSettings,
    TrainingPlan,
)

PACKAGE_ROOT = Path(__file__).parents[2] / "provider"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RANK_SCRIPT = """
import json, os, sys
from deepspeed_provider.training import launcher
{sabotage}
result = launcher.main(json.load(open(sys.argv[1])))
open(sys.argv[2] + os.environ["RANK"], "w").write(json.dumps(result))
"""
# Many plans in one torchrun: each in a fork of ranks that have imported the libraries already. Frozen, what
# they imported is left alone by the garbage collections that DeepSpeed forces at each start.
MANY_SCRIPT = """
import contextlib, gc, importlib, json, os, sys, time, traceback
from deepspeed_provider.training import launcher
for name in {imports!r}:
    with contextlib.suppress(ModuleNotFoundError):  # older releases lack some
        importlib.import_module(name)
gc.collect()
gc.freeze()
rank = os.environ["RANK"]
for number, job in enumerate(json.load(open("jobs.json"))):
    child = os.fork()
    if child == 0:
        log = os.open(f"log{{number}}-{{rank}}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # A process group of their own for each plan, not the store that the agent keeps for all.
        os.environ.update(MASTER_PORT=str(job["port"]), TORCHELASTIC_USE_AGENT_STORE="False")
        status, started_s = 1, time.monotonic()
        try:
            exec(job["sabotage"], {{"os": os}})
            result = launcher.main(job["wire"])
            seconds = time.monotonic() - started_s
            open(f"returned{{number}}-{{rank}}", "w").write(json.dumps([result, seconds]))
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    os.waitpid(child, 0)
"""
MANY_IMPORTS = (
    *("torch", "torch._dynamo", "functorch.compile", "torch.utils.cpp_extension", "pyarrow.parquet", "pyarrow.dataset"),
    *("transformers", "transformers.models.llama.modeling_llama", "peft", "deepspeed", "deepspeed.runtime.engine"),
    *("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3", "deepspeed.ops.op_builder.all_ops"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.superoffload.superoffload_stage3"),
    *("deepspeed.module_inject.auto_ep_layer", "peft.utils.transformers_weight_conversion"),
    *("deepspeed_provider.training.causal_lm", "deepspeed_provider.training.evaluate"),
)

# Configurations of tiny models of other families, by the name of the family.
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neo": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4},
        **{"max_position_embeddings": 256, "attention_types": [[["global", "local"], 1]]},
    },
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 4},
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "qwen3": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    },
}
# Of these, what transformers 5.24 (and 4.50) has no SDPA for.
WITHOUT_SDPA = {"bloom", "gpt_neo", "mamba", "openai-gpt"}


def make_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A byte-level tokenizer of about 300 tokens, saved into ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator([f"What is {n} plus one? It is {n + 1}." for n in range(60)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A randomly initialised two-layer Llama with its tokenizer, as ``save_pretrained`` leaves it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder, chat_template=chat_template)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        # A frozen head of small weights could never be sure of a token, whatever an adapter learns.
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_model_of(family: str, folder: Path) -> Path:
    """The same of one of ``FAMILIES``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    new_model_of(family, vocab_size=len(tokenizer), end=tokenizer.eos_token_id).save_pretrained(folder)
    return folder


def new_model_of(family: str, *, vocab_size: int = 300, end: int = 0) -> Any:
    """A tiny model of one of ``FAMILIES`` in memory, randomly initialised."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = AutoConfig.for_model(family, vocab_size=vocab_size, **ids, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config)


def make_dataset(folder: Path, *, train_rows: int = 48, heldout_rows: int = 9) -> Path:
    """Questions and answers about adding one; each tenth row is plain text without a prompt."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(split: str, numbers: range) -> None:
        (folder / split).mkdir(parents=True)
        prompts = [None if n % 10 == 0 else f"What is {n} plus one?" for n in numbers]
        schema = pa.schema([("prompt", pa.string()), ("completion", pa.string())])
        table = pa.table({"prompt": prompts, "completion": [f"It is {n + 1}." for n in numbers]}, schema=schema)
        pq.write_table(table, folder / split / "part-0.parquet")

    write("train", range(train_rows))
    write("heldout", range(train_rows, train_rows + heldout_rows))
    return folder


def ds_config(stage: int, *, micro: int, accumulation: int, world_size: int, **extra: Any) -> dict[str, Any]:
    return {
        "train_batch_size": micro * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        **extra,
    }


def plan(
    output: Path,
    model: Path | str,
    dataset: Path,
    *,
    method: str = "full",
    stage: int = 2,
    micro: int = 4,
    accumulation: int = 1,
    world_size: int = 2,
    precision: str = "fp32",
    tracking: TrackingSettings | None = None,
    merge_adapter: bool = True,
    optimization: dict[str, Any] | None = None,
    ds_extra: dict[str, Any] | None = None,
) -> TrainingPlan:
    settings = {"learning_rate": 5e-3, "max_steps": 6, "sequence_length": 64, **(optimization or {})}
    precision_block = {} if precision == "fp32" else {precision: {"enabled": True}}
    return TrainingPlan(
        job="finetune",
        token="token-of-this-run",
        output_uri=str(output),
        cache_uri=str(output.parent / "cache"),
        world_size=world_size,
        model=ModelSettings(ref=str(model), precision=precision),
        dataset_uri=str(dataset),
        method=MethodSettings(name=method, lora_rank=8, lora_alpha=16),
        optimization=OptimizationSettings(micro_batch_size=micro, gradient_accumulation_steps=accumulation, **settings),
        deepspeed_config=ds_config(
            stage, micro=micro, accumulation=accumulation, world_size=world_size, **precision_block, **(ds_extra or {})
        ),
        use_gpu=False,
        merge_adapter=merge_adapter,
        tracking=tracking,
    )


def evaluation_of(finetuned: TrainingPlan, output: Path, **settings: Any) -> TrainingPlan:
    """The plan that evaluates what ``finetuned`` has saved."""
    return dataclasses.replace(
        finetuned,
        job="evaluate",
        output_uri=str(output),
        evaluation=EvaluationSettings(tuned_uri=f"{finetuned.output_uri}/model", max_new_tokens=8, **settings),
        deepspeed_config={},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a torchrun left behind."""

    returncode: int
    text: str
    output: Path
    returned: dict[int, Any]
    seconds: float = 0.0
    """How long the slowest rank took, imports not counted; of ``torchrun_many`` only."""

    def read(self, name: str) -> Any:
        return json.loads((self.output / name).read_text())

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.output.iterdir()}


def torchrun(
    wire: dict[str, Any],
    scratch: Path,
    *,
    processes: int = 2,
    sabotage: str = "",
    env: dict[str, str] | None = None,
    timeout_s: float = 240,
) -> Outcome:
    """Run ``launcher.main`` in ``processes`` ranks. ``sabotage`` is code that each rank runs beforehand."""
    scratch.mkdir(parents=True, exist_ok=True)
    for stale in scratch.glob("returned*"):
        stale.unlink()
    (scratch / "train.py").write_text(RANK_SCRIPT.format(sabotage=textwrap.dedent(sabotage)))
    (scratch / "plan.json").write_text(json.dumps(wire))
    done = _start_torchrun(scratch, processes, env or {}, timeout_s=timeout_s)
    files = {int(path.name.removeprefix("returned")): path for path in scratch.glob("returned*")}
    returned = {rank: json.loads(path.read_text()) for rank, path in files.items()}
    return Outcome(
        returncode=done.returncode, text=done.stdout, output=Path(wire.get("output_uri", scratch)), returned=returned
    )


def torchrun_many(
    plans: list[TrainingPlan],
    scratch: Path,
    *,
    processes: int = 2,
    sabotage: dict[int, str] | None = None,
    also_import: tuple[str, ...] = (),
    python: Path | str = sys.executable,
    packages: tuple[Path, ...] = (),
) -> list[Outcome]:
    """Run plans one after the other, in ranks that pay for importing once; each plan has a text of its own.

    ``sabotage`` is code that the ranks of the plan with that number run beforehand. Folders in ``packages``
    come before what ``python`` has installed.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    jobs = [
        {"wire": plan.to_json(), "port": free_port(), "sabotage": textwrap.dedent((sabotage or {}).get(number, ""))}
        for number, plan in enumerate(plans)
    ]
    (scratch / "jobs.json").write_text(json.dumps(jobs))
    (scratch / "train.py").write_text(MANY_SCRIPT.format(imports=(*MANY_IMPORTS, *also_import)))
    env = {"PYTHONPATH": search_path(*packages)}
    done = _start_torchrun(scratch, processes, env, timeout_s=300 + 40 * len(plans), python=python)
    assert done.returncode == 0, done.stdout[-6000:]
    return [_outcome_of_many(scratch, number, plan, processes) for number, plan in enumerate(plans)]


def _outcome_of_many(scratch: Path, number: int, plan: TrainingPlan, processes: int) -> Outcome:
    files = {rank: scratch / f"returned{number}-{rank}" for rank in range(processes)}
    returned = {rank: json.loads(path.read_text()) for rank, path in files.items() if path.exists()}
    return Outcome(
        returncode=0 if len(returned) == processes else 1,
        text="".join((scratch / f"log{number}-{rank}").read_text() for rank in range(processes)),
        output=Path(plan.output_uri),
        returned={rank: result for rank, (result, _) in returned.items()},
        seconds=max((seconds for _, seconds in returned.values()), default=0.0),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def search_path(*folders: Path) -> str:
    """A ``PYTHONPATH`` of these folders and the provider's code."""
    return os.pathsep.join(map(str, [*folders, PACKAGE_ROOT]))


def _start_torchrun(
    scratch: Path, processes: int, env: dict[str, str], *, timeout_s: float, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.run(
        [*command, "train.py", "plan.json", "returned"],
        env={**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", **env},
        cwd=scratch,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        check=False,
    )
