"""The sizes that engines capture by default, for comparison with a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from graphshare.arguments import listed, whole_number
from graphshare.descriptor import BatchDescriptor, capture_descriptors
from graphshare.planning.arguments import lengths_of

__all__ = ["ladders", "powers_of_two", "sglang", "vllm"]


def powers_of_two(max_tokens: int) -> list[int]:
    """1, 2, 4, ... and ``max_tokens``.

    Args:
        max_tokens: The largest size.
    """
    sizes = [1 << power for power in range(max_tokens.bit_length())]
    return sorted({*sizes, max_tokens})


def vllm(max_tokens: int) -> list[int]:
    """Sizes that vLLM captures by default: 1, 2, 4, then every 8 below 256 and every 16 from there.

    ``VllmConfig._set_cudagraph_sizes`` of vLLM 0.25.1. There the largest size is by default
    ``min(512, 2 * max_num_seqs * query_len)``, and one that is no multiple is left out.

    Args:
        max_tokens: The largest size.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_tokens + 1, 16)]
    return [size for size in sizes if size <= max_tokens]


def sglang(max_tokens: int) -> list[int]:
    """Sizes that SGLang captures by default for prefill, in tokens.

    ``generate_prefill_cuda_graph_batch_sizes`` of SGLang 0.5.23.

    Args:
        max_tokens: The largest size.
    """
    sizes = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, max_tokens + 1, 512),
    ]
    return [size for size in sizes if size <= max_tokens]


def sglang_decode(max_reqs: int, *, speculative: bool) -> list[int]:
    """Sizes that SGLang captures by default for decoding, in requests.

    ``generate_decode_cuda_graph_batch_sizes`` of SGLang 0.5.23.

    Args:
        max_reqs: The largest size.
        speculative: Whether each request has several tokens.
    """
    if speculative:
        sizes = [
            *range(1, 9),
            *range(10, 33, 2),
            *range(40, 65, 4),
            *range(72, 257, 8),
            *range(272, max_reqs + 1, 16),
        ]
    else:
        sizes = [
            *(1, 2, 4, 8, 12),
            *range(16, 257, 8),
            *range(272, 512, 16),
            *range(512, max_reqs + 1, 32),
        ]
    return sorted({*(size for size in sizes if size <= max_reqs), max_reqs})


def ladders(
    max_tokens: int,
    max_num_reqs: int,
    uniform_query_lens: Iterable[int] = (),
    num_active_loras: Iterable[int] = (0,),
) -> Mapping[str, list[BatchDescriptor]]:
    """The keys that the usual sizes make, by name.

    ``"powers of two"`` and ``"vLLM"``: :func:`graphshare.capture_descriptors` of the sizes.
    ``"SGLang"`` captures decoding by requests, so its uniform keys are those of
    ``sglang_decode`` for each length (1 where none is given), beside the mixed keys of ``sglang``.

    Args:
        max_tokens: The most tokens of a key.
        max_num_reqs: The most requests of a key.
        uniform_query_lens: Query lengths with keys of their own.
        num_active_loras: Numbers of active LoRA adapters, each with all keys.

    Raises:
        TypeError: What is no integer, or not several.
        ValueError: One below 1, or adapters below 0.
    """
    max_tokens = whole_number("max_tokens", max_tokens, 1)
    max_num_reqs = whole_number("max_num_reqs", max_num_reqs, 1)
    lengths = lengths_of(uniform_query_lens)
    loras = [
        whole_number("num_active_loras", count, 0)
        for count in listed("num_active_loras", num_active_loras, "integers")
    ]

    def keys(sizes: list[int]) -> list[BatchDescriptor]:
        return capture_descriptors(sizes, max_num_reqs, lengths, num_active_loras=loras)

    decode = [
        BatchDescriptor(reqs * length, reqs, length, num_active_loras=count)
        for length in lengths or (1,)
        for reqs in sglang_decode(
            max(1, min(max_num_reqs, max_tokens // length)), speculative=length > 1
        )
        for count in loras
    ]
    prefill = capture_descriptors(sglang(max_tokens), max_num_reqs, num_active_loras=loras)
    return {
        "powers of two": keys(powers_of_two(max_tokens)),
        "vLLM": keys(vllm(max_tokens)),
        "SGLang": sorted([*decode, *prefill], key=BatchDescriptor.cost, reverse=True),
    }
