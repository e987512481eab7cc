# SPDX-License-Identifier: Apache-2.0
"""Runs in each rank of a torchrun: DeepSpeed engines one after the other, their tensors counted by role.

    real_engine.py CASES RESULTS

reads cases by name (see ``test_real_engines.py``) and writes, for each, bytes by role at moments of a step:

- ``idle``: between two steps; ``turn``: after a forward pass;
- ``unreduced``: after the backward pass, where gradients are reduced only then;
- ``reduced``: the last gradients are on their ranks, buckets are still there; ``kept``: buckets are gone;
- ``stepping``: when the wrapped torch optimizer begins its step;

and, as ``reduction_peak`` and ``step_peak``, the most that was there at once while gradients were reduced,
and from ``kept`` (in stage 3, once nothing is gathered) until the last ``stepping``; as ``backward``, the
largest tensor in double precision made meanwhile. A storage counts once, whole, under the first role that
claims it; ``unclaimed`` is what else is alive.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Counts = dict[str, int]

# gloo's threads hold a collective's tensors a little longer than the collective takes; what they let go of in the
# middle of a step would be missing from its peak.
SETTLE_SECONDS = 0.2


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages alive, and the most there were; of the largest in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = self.largest_double = 0
        for tensor in all_tensors():
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.alive[key] = weakref.ref(storage, lambda _: self.gone(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def gone(self, key: int, size: int) -> None:
        del self.alive[key]
        self.now -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
                if leaf.dtype is torch.float64:
                    self.largest_double = max(self.largest_double, leaf.untyped_storage().nbytes())
        return result


def all_tensors() -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return [tensor for tensor in found if tensor.device.type == "cpu" and tensor.layout is torch.strided]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for item in value.values() for tensor in tensors_in(item))
    elif isinstance(value, list | tuple):
        yield from (tensor for item in value for tensor in tensors_in(item))


def claims(engine: Any) -> dict[str, list[torch.Tensor]]:
    """Which tensors the engine holds for what; the first role that names a tensor's storage gets it."""
    wrapper = engine.optimizer
    inner = getattr(wrapper, "optimizer", wrapper)
    parameters = list(engine.module.parameters())
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_tensor")]
    gathered = [item for item in partitioned if item.ds_status.name == "AVAILABLE"]

    def held(*names: str) -> list[torch.Tensor]:
        return [tensor for name in names for tensor in tensors_in(getattr(wrapper, name, None))]

    master = held("fp32_groups", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    buckets = getattr(wrapper, "ipg_buckets", {}).values()
    return {
        "weights": [item.ds_tensor for item in partitioned] or [item.data for item in parameters],
        "persistent_parameters": [item.data for item in gathered if item.ds_persist],
        "gathered_parameters": [item.data for item in gathered if not item.ds_persist],
        "reduce_bucket": list(tensors_in([bucket.buffer for bucket in buckets])),
        "master_weights": master,
        "optimizer_states": [item for item in tensors_in(list(inner.state.values())) if item.numel() > 1],
        "master_gradients": [item.grad for item in master if item.grad is not None],
        "offload_staging_gpu": held("temp_grad_buffer_for_gpu_offload"),
        "offload_staging_host": held("temp_grad_buffer_for_cpu_offload"),
        "offload_weights_host": held("param_buffer_of_bit16_for_cpu_offload_groups"),
        "offload_accumulated_host": held("accumulated_grads_in_cpu"),
        "gradients": [
            *(item.grad for item in parameters if item.grad is not None),
            *held("grads_in_partition", "averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer"),
        ],
    }


def count(engine: Any) -> Counts:
    seen: set[int] = set()

    def unseen_bytes(tensors: list[torch.Tensor]) -> int:
        storages = {item.untyped_storage()._cdata: item.untyped_storage().nbytes() for item in tensors}
        found = sum(size for key, size in storages.items() if key not in seen)
        seen.update(storages)
        return found

    counts = {role: unseen_bytes(tensors) for role, tensors in claims(engine).items()}
    counts["unclaimed"] = unseen_bytes(all_tensors())
    return counts


class Observer:
    """Counts an engine's tensors at the moments of one step."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.counts: dict[str, Counts] = {}
        self.live: LiveBytes | None = None
        wrapper = engine.optimizer
        self._around(getattr(wrapper, "optimizer", wrapper), "step", self._inner_step)
        if hasattr(wrapper, "_release_ipg_buffers"):
            self._around(wrapper, "_release_ipg_buffers", self._noted("reduced"))
        if hasattr(wrapper, "reduce_gradients"):
            self._around(wrapper, "reduce_gradients", self._reduction)
        if hasattr(wrapper, "_partition_all_parameters"):
            self._around(wrapper, "_partition_all_parameters", self._release)
        if not hasattr(wrapper, "ipg_buckets"):
            self._around(engine, "buffered_allreduce_fallback", self._reduction)

    def _around(self, owner: Any, name: str, observe: Any) -> None:
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: observe(lambda: method(*args, **kwargs)))

    def note(self, moment: str) -> None:
        """Of several micro-batches' or groups' moments the fullest counts."""
        found, known = count(self.engine), self.counts.get(moment)
        if known is None or sum(found.values()) > sum(known.values()):
            self.counts[moment] = found

    def _noted(self, moment: str) -> Any:
        def observe(call: Any) -> Any:
            self.note(moment)
            return call()

        return observe

    def _reduction(self, call: Any) -> Any:
        time.sleep(SETTLE_SECONDS)
        self.note("unreduced")
        live = LiveBytes()
        with live:
            result = call()
        self._peak("reduction_peak", live, "unreduced")
        return result

    def _release(self, call: Any) -> Any:
        """Stage 3 begins its step by giving up all that is still gathered."""
        result = call()
        if self.live is not None:
            self.live.peak = self.live.now
        return result

    def _inner_step(self, call: Any) -> Any:
        """What torch's optimizer makes meanwhile is its own, and is left out of the peak."""
        self.note("stepping")
        if self.live is None:
            return call()
        self._peak("step_peak", self.live, "kept")
        result = call()
        self.live.peak = self.live.now
        return result

    def _peak(self, name: str, live: LiveBytes, since: str) -> None:
        peak = live.peak - self.counts[since]["unclaimed"]
        self.counts[name] = {"all": max(peak, self.counts.get(name, {}).get("all", 0))}

    def backward(self, loss: torch.Tensor) -> None:
        live = LiveBytes()
        with live:
            self.engine.backward(loss)
        known = self.counts.get("backward", {}).get("double", 0)
        self.counts["backward"] = {"double": max(known, live.largest_double)}

    def step(self) -> None:
        time.sleep(SETTLE_SECONDS)
        self.note("kept")
        self.live = LiveBytes()
        with self.live:
            self.engine.step()
        self.live = None


def run(case: dict[str, Any], model_config: dict[str, Any]) -> dict[str, Counts]:
    """Two optimizer steps to warm up (optimizer states, the trace of stage 3), a third one observed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**model_config, use_cache=False))
    if case.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**case["lora"], task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=trained,
        optimizer=torch.optim.AdamW(trained, lr=1e-4),
        config=case["deepspeed"],
    )
    del model, trained
    tokens = torch.arange(16).reshape(1, 16) % model_config["vocab_size"]
    micro_batches = case["deepspeed"].get("gradient_accumulation_steps", 1)
    for _ in range(2 * micro_batches):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    observer = Observer(engine)
    observer.note("idle")
    for number in range(micro_batches):
        loss = engine(input_ids=tokens, labels=tokens).loss
        observer.note("turn")
        observer.backward(loss)
        del loss
        if number + 1 < micro_batches:
            engine.step()
    observer.step()
    observer.engine = None
    engine.destroy()
    return observer.counts


def main() -> None:
    cases_path, results_path = sys.argv[1:]
    with open(cases_path) as stream:
        given = json.load(stream)
    started_s = time.monotonic()
    deepspeed.init_distributed("gloo")
    results = {}
    for name, case in given["cases"].items():
        results[name] = run(case, given["model"])
        gc.collect()
        print(name, round(time.monotonic() - started_s, 1), flush=True)
    with open(f"{results_path}{os.environ['RANK']}", "w") as stream:
        json.dump(results, stream)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
