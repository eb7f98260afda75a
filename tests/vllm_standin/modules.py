"""A version of the small vLLM as modules, under the names that vLLM's have."""

from __future__ import annotations

from types import ModuleType

from tests.vllm_standin import managers, offloader, parts, runner, speculators

GPU = "vllm.v1.worker.gpu"

SPECULATORS = {
    "0.20.2": speculators.Speculator_0_20,
    "0.21.0": speculators.Speculator_0_21,
    "0.25.1": speculators.Speculator_0_25,
    "0.26.0": speculators.Speculator_0_26,
}


def make_modules(version):
    """Return the modules by name; nothing is imported or installed."""
    made: dict[str, ModuleType] = {}

    def module(name, **contents):
        parents = name.split(".")
        for i in range(1, len(parents) + 1):
            full = ".".join(parents[:i])
            if full not in made:
                made[full] = ModuleType(full)
                made[full].__path__ = []
                if i > 1:
                    setattr(made[".".join(parents[: i - 1])], parents[i - 1], made[full])
        vars(made[name]).update(contents)
        return made[name]

    old = version in ("0.20.2", "0.21.0")
    base = managers.base_manager(version)
    inputs = (
        managers.old_prepare_inputs_to_capture
        if version == "0.20.2"
        else managers.prepare_inputs_to_capture
    )
    utils = module(
        f"{GPU}.cudagraph_utils",
        CudaGraphManager=base,
        prepare_inputs_to_capture=inputs,
        BatchExecutionDescriptor=base.descriptor,
        AttentionState=parts.AttentionState,
        AttentionStatePair=parts.AttentionStatePair,
        CapturedAttentionState=parts.CapturedAttentionState,
        _is_compatible=managers._is_compatible,
        get_offloader=offloader.get_offloader,
    )
    utils.ModelCudaGraphManager = managers.model_manager(version, base, utils)
    spec = f"{GPU}.spec_decode"
    drafts = module(
        f"{spec}.eagle.cudagraph" if old else f"{spec}.autoregressive.cudagraph_utils",
        prepare_inputs_to_capture=inputs,
    )
    building = managers.building_manager(version, base, drafts)
    if version in ("0.21.0", "0.25.1"):
        reading = managers.reading_manager(version, base)
        middle = "Eagle" if old else "Speculator"
        setattr(drafts, f"Prefill{middle}CudaGraphManager", reading)
        setattr(drafts, f"Decode{middle}CudaGraphManager", building)
        pair = reading, building
    else:
        name = "EagleCudaGraphManager" if old else "SpeculatorCudaGraphManager"
        setattr(drafts, name, building)
        pair = building, building
    speculator = SPECULATORS[version]
    module(f"{spec}.eagle.speculator", EagleSpeculator=speculator)
    if not old:
        module(f"{spec}.autoregressive.speculator", AutoRegressiveSpeculator=speculator)
        module(f"{spec}.speculator", DraftModelSpeculator=speculator)
    module(f"{GPU}.attn_utils", build_slot_mappings_by_layer=parts.build_slot_mappings_by_layer)
    module(f"{GPU}.model_states.default", DefaultModelState=parts.DefaultModelState)
    module(f"{GPU}.block_table", BlockTables=parts.BlockTables)
    module(f"{GPU}.input_batch", InputBuffers=parts.InputBuffers, InputBatch=parts.InputBatch)
    backends = "vllm.v1.attention.backends"

    def get_flash_attn_version(
        requires_alibi=False, head_size=None, head_size_v=None, has_sinks=False
    ):
        return 3

    module(f"{backends}.fa_utils", get_flash_attn_version=get_flash_attn_version)
    module(
        f"{backends}.flash_attn",
        FlashAttentionMetadata=parts.flash_metadata(version),
        FlashAttentionMetadataBuilder=parts.FlashAttentionBuilder,
    )
    module(f"{backends}.triton_attn", TritonAttentionMetadata=parts.triton_metadata(version))
    module("vllm.v1.worker.utils", AttentionGroup=parts.AttentionGroup)
    worker = type("Worker", (runner.Worker,), {})  # of its own: it is patched
    module("vllm.v1.worker.gpu_worker", Worker=worker)
    world = module(f"{GPU}.model_runner")
    world.ModelCudaGraphManager = utils.ModelCudaGraphManager
    world.EagleSpeculator = speculator
    world.draft_managers = pair
    world.build_slot_mappings_by_layer = parts.build_slot_mappings_by_layer
    world.GPUModelRunner = runner.runner_class(version, world)
    world.GPUModelRunner.__module__ = world.__name__
    worker.compile_or_warm_up_model = runner.Worker.compile_or_warm_up_model
    return made
