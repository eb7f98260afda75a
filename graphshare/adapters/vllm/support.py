"""What graphshare leaves alone, and says so at start."""

from __future__ import annotations

from typing import Any

from graphshare.adapters.vllm.backends import BACKENDS, drops_mask
from graphshare.adapters.vllm.signatures import first_difference

__all__ = ["full_keys", "why_not"]

_METHODS = ("eagle", "eagle3")


def full_keys(manager: Any) -> list[Any]:
    """Return the descriptors for which a graph manager captures one graph of the whole model."""
    if manager is None:
        return []
    return [
        desc
        for mode, descs in manager._capture_descs.items()
        if mode.name == "FULL"
        for desc in descs
    ]


def why_not(runner: Any, family: Any) -> str | None:
    """Return why graphshare does not take part in this runner; ``None`` if it does.

    Args:
        runner: What vLLM's worker calls its model runner.
        family: What is known of this version of vLLM.
    """
    if type(runner).__module__ != family.runner_module:
        return "the V1 model runner shares no state; VLLM_USE_V2_MODEL_RUNNER=1 chooses the other"
    difference = first_difference(family.version)
    if difference is not None:
        return f"it is not vLLM {family.version} as released: {difference}"
    speculator = runner.speculator
    if speculator is None:
        return "there is no speculative decoding"
    method = runner.speculative_config.method
    if method not in _METHODS or type(speculator) is not family.speculator_class():
        return f"speculative decoding by {method!r}; supported are {', '.join(_METHODS)}"
    if type(runner.model_state) is not family.model_state_class():
        return f"the model keeps a state of its own ({type(runner.model_state).__name__})"
    return (
        _why_not_parallel(runner.parallel_config)
        or _why_not_model(runner.model_config)
        or _why_not_attention(runner, family)
        or _why_not_graphs(runner)
    )


def _why_not_parallel(config: Any) -> str | None:
    for name in (
        "data_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(config, name, 1)
        if size != 1:
            return f"{name} is {size}, supported is 1"
    return None


def _why_not_model(config: Any) -> str | None:
    if getattr(config, "is_mm_prefix_lm", False):
        return "ranges of a multimodal prefix are new tensors in each step"
    if getattr(config, "rswa_window", None) is not None:
        return "reference sliding windows are not supported"
    return None


def _why_not_attention(runner: Any, family: Any) -> str | None:
    groups = [group for within in runner.attn_groups for group in within]
    for group in groups:
        name = group.backend.get_name()
        if name not in BACKENDS:
            return f"attention backend {name}; supported are {', '.join(BACKENDS)}"
        if name == "FLASH_ATTN" and family.flash_attn_version() != 3:
            return f"FlashAttention {family.flash_attn_version()}; supported is 3"
    served = {name for group in groups for name in group.layer_names}
    missing = sorted(set(runner.speculator.draft_attn_layer_names) - served)
    if missing:
        return f"the runner's attention groups lack the draft's layer {missing[0]}"
    return None


def _head_size_without_mask(runner: Any) -> int | None:
    """Return a head size at which FlashAttention 3 sees no need for a mask with one row."""
    for group in (each for within in runner.attn_groups for each in within):
        size = group.kv_cache_spec.head_size
        if group.backend.get_name() == "FLASH_ATTN" and drops_mask(size):
            return size
    return None


def _why_not_graphs(runner: Any) -> str | None:
    speculator = runner.speculator
    keys = full_keys(runner.cudagraph_manager)
    if not keys:
        return "no full CUDA graph is captured (cudagraph_mode)"
    size = _head_size_without_mask(runner)
    if size is not None and any(
        key.uniform_token_count is None and key.num_tokens < 2 * key.num_reqs for key in keys
    ):
        return (
            f"captured on one token a request, FlashAttention 3 drops the causal mask at head size "
            f"{size}, and vLLM's full graphs of mixed batches are wrong for more tokens a request; "
            "cudagraph_mode FULL_AND_PIECEWISE or FULL_DECODE_ONLY has none"
        )
    if not full_keys(speculator.prefill_cudagraph_manager):
        return "the draft's prefill captures no full CUDA graph"
    return None
