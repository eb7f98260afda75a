"""The small vLLM is vLLM, as far as the adapter can tell."""

from __future__ import annotations

from graphshare.adapters.vllm.signatures import expected, first_difference


def test_the_small_vllm_has_the_signatures_of_the_wheel(vllm) -> None:
    assert first_difference(vllm.version) is None


def test_the_small_vllm_has_the_attributes_of_the_wheel(vllm) -> None:
    runner = vllm.start()
    instances = {
        "GPUModelRunner": runner,
        "CudaGraphManager": runner.cudagraph_manager,
        "ModelCudaGraphManager": runner.cudagraph_manager,
        "BlockTables": runner.block_tables,
        "InputBuffers": runner.input_buffers,
        "FlashAttentionMetadataBuilder": runner.attn_groups[0][0].get_metadata_builder(0),
        "EagleSpeculator": runner.speculator,
        "AutoRegressiveSpeculator": runner.speculator,
        "DraftModelSpeculator": runner.speculator,
    }
    for name, attributes in expected()[vllm.version]["attributes"].items():
        instance = instances[name.partition(":")[2]]
        assert [each for each in attributes if not hasattr(instance, each)] == []
