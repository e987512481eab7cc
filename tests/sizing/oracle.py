# SPDX-License-Identifier: Apache-2.0
"""Peak tensor memory of one training step, counted on fake tensors: the real model code of
transformers and PEFT runs forward, backward and optimizer step, but no storage is allocated.

Every storage that an operation makes is counted from its making to its release, rounded up to the
512 bytes of CUDA's caching allocator. Attention resolves to the CPU's flash kernel, which keeps
query, key, value, output and the log-sum-exp as the CUDA kernels do.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from sizing.case import Case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 512


class Tracker(TorchDispatchMode):
    """Bytes of all storages alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known: dict[int, int] = {}

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = math.ceil(storage.nbytes() / BLOCK) * BLOCK
        self._known[key] = size
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._released, key)

    def _released(self, key: int) -> None:
        self.alive -= self._known.pop(key)

    def reset_peak(self) -> None:
        self.peak = self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self.count, out)
        return out


class _Nf4Matmul(torch.autograd.Function):
    """Dequantises in forward and in backward; keeps the packed weight beside autograd, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, out_features: int) -> Any:
        ctx.tensors = (packed, absmax)
        ctx.shape = (out_features, x.shape[-1])
        return x @ x.new_empty(ctx.shape).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ grad.new_empty(ctx.shape), None, None, None


class _Nf4Linear(torch.nn.Linear):
    """A linear layer as bitsandbytes keeps it: packed weight, scales, 16-bit computation."""

    packed: torch.Tensor
    absmax: torch.Tensor
    compute_dtype: torch.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = _Nf4Matmul.apply(x.to(self.compute_dtype), self.packed, self.absmax, self.out_features)
        if self.bias is not None:
            out = out + self.bias.to(self.compute_dtype)
        return out.to(x.dtype)


def peak_bytes(case: Case) -> dict[str, int]:
    """Bytes in the second step: {"parameters", "resident" (with optimizer states), "forward_peak", "backward_peak"}.

    The optimizer steps only where gradients are kept; freed ones stand for ZeRO 2 and 3, whose step is its own.
    """
    model = _meta_model(case)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return _count(case, _with_fake_storages(model, case, mode))


def _meta_model(case: Case) -> Any:
    import transformers

    settings = {k: v for k, v in case.config.items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(case.config["model_type"], **settings)
    config._attn_implementation = case.attention
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=case.attention
        )
    model.train()
    if case.method != "full":
        model = _with_adapters(model, case)
    if case.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.method != "full":
            model.enable_input_require_grads()
    return model


def _with_adapters(model: Any, case: Case) -> Any:
    import peft
    from transformers.pytorch_utils import Conv1D

    if case.method == "qlora":
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear | Conv1D) and name not in ("lm_head", "embed_out"):
                    setattr(parent, name, _nf4(child, case))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.dtype == torch.bfloat16 and not getattr(parameter, "quantised", False):
                parameter.data = parameter.data.to(torch.float32)
    config = peft.LoraConfig(
        r=case.lora_rank, lora_alpha=16, lora_dropout=0.0, target_modules=case.lora_targets, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def _nf4(linear: Any, case: Case) -> _Nf4Linear:
    shape = (linear.in_features, linear.out_features) if isinstance(linear, torch.nn.Linear) else linear.weight.shape
    new = _Nf4Linear(*shape, bias=linear.bias is not None, device="meta", dtype=torch.bfloat16)
    count = linear.weight.numel()
    new.weight = torch.nn.Parameter(torch.empty(0, device="meta", dtype=torch.bfloat16), requires_grad=False)
    new.weight.quantised = True
    new.compute_dtype = torch.bfloat16
    blocks = math.ceil(count / 64)
    scale_bytes = blocks + 4 * math.ceil(blocks / 256) if case.double_quant else 4 * blocks
    new.register_buffer("packed", torch.empty(count // 2, dtype=torch.uint8, device="meta"))
    new.register_buffer("absmax", torch.empty(scale_bytes, dtype=torch.uint8, device="meta"))
    return new


def _with_fake_storages(model: Any, case: Case, mode: FakeTensorMode) -> Any:
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if tensor.requires_grad and case.method != "full" else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype)

    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = torch.nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    model._originals = made
    return model


def _count(case: Case, model: Any) -> dict[str, int]:
    tracker = Tracker()
    parameters = [p for p in model.parameters() if p.requires_grad]
    for tensor in [*model.parameters(), *model.buffers()]:
        tracker.count(tensor)
    weights = tracker.alive
    if case.gradients_freed:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    vocab = case.config["vocab_size"]
    shape = (case.micro_batch_size, case.sequence_length)
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    counted = {"parameters": weights}
    with tracker:
        for _ in range(2):
            counted["resident"] = tracker.alive
            ids = torch.randint(0, vocab, shape)
            tracker.reset_peak()
            # Real batches are padded: without a mask the model code leaves it out, or not, by itself.
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
            counted["forward_peak"] = tracker.peak
            out.loss.backward()
            counted["backward_peak"] = tracker.peak
            if not case.gradients_freed:
                optimizer.step()
                optimizer.zero_grad()
            del out
    return counted
