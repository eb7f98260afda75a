"""What differs between versions of vLLM, with what holds for the newest one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from graphshare.adapters.vllm.loops import CaptureLoops, LentStates
from graphshare.adapters.vllm.patches import Patches
from graphshare.capturing import Capturing
from graphshare.owner import Phase
from graphshare.state import AttentionState

__all__ = ["Family", "LendingFamily", "asked_once"]

Builds = Callable[..., Any]

_GPU = "vllm.v1.worker.gpu"


class Family:
    """One version of vLLM. A subclass overrides what is otherwise there.

    Attributes:
        version: Of vLLM.
        runner_module: Where the V2 model runner lies.
        managers_module: Where the graph managers' base class lies.
        draft_managers_module: Where the draft's graph managers lie.
        without_rebuild: Makes of ``_build_draft_attn_metadata`` one that builds nothing for a
            prefill while ``active()``; ``None`` where vLLM never asks for that.
        lengths_bounded: Whether ``max_seq_len`` of the metadata stays within the model's maximum.
    """

    version: str
    runner_module = f"{_GPU}.model_runner"
    managers_module = f"{_GPU}.cudagraph_utils"
    without_rebuild: Callable[[Builds, Callable[[], bool]], Builds] | None = None
    draft_managers_module = f"{_GPU}.spec_decode.autoregressive.cudagraph_utils"
    lengths_bounded = True

    @staticmethod
    def rebuilds_prefill(kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of ``_build_draft_attn_metadata`` with these is for a prefill."""
        del kwargs
        return False

    def speculator_class(self) -> type:
        """Return the class of the speculators that are supported."""
        return _named(f"{_GPU}.spec_decode.eagle.speculator", "EagleSpeculator")

    def model_state_class(self) -> type:
        """Return the class of the model states that are supported."""
        return _named(f"{_GPU}.model_states.default", "DefaultModelState")

    def flash_attn_version(self) -> int | None:
        """Return which FlashAttention vLLM runs here."""
        ask = _named("vllm.v1.attention.backends.fa_utils", "get_flash_attn_version")
        return ask()

    def capture_inputs(self) -> Callable[..., Any]:
        """Return vLLM's ``prepare_inputs_to_capture``."""
        return _named(self.managers_module, "prepare_inputs_to_capture")

    def managers(self) -> ModuleType:
        """Return the module where the graph managers' base class lies."""
        return importlib.import_module(self.managers_module)

    def patch_loops(self, loops: CaptureLoops, target_manager: Any, patches: Patches) -> None:
        """Take part in the capture loops until the patches are undone.

        Args:
            loops: Of the runner.
            target_manager: The runner's graph manager.
            patches: Where to note what is replaced.
        """
        managers = self.managers()
        drafts = importlib.import_module(self.draft_managers_module)
        original = managers.CudaGraphManager.capture

        def capture(manager: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
            result = loops.run(original, manager, self.wrap, create_forward_fn, *args, **kwargs)
            return self.lent(loops, result) if manager is target_manager else result

        patches.set(managers.CudaGraphManager, "capture", capture)
        # Each of the two modules has the function by its own name.
        for module in (managers, drafts):
            patches.set(module, "prepare_inputs_to_capture", loops.inputs)

    def wrap(self, loops: CaptureLoops, capturing: Capturing[Any], factory: Any) -> Any:
        """Put ``loops.make`` around a factory of forwards: here, asked once for each phase."""

        def create_forward_fn(desc: Any, warmup: bool) -> Any:
            phase = Phase.WARMUP if warmup else Phase.CAPTURE
            return loops.make(capturing, desc, phase, lambda: factory(desc, warmup=warmup))

        return create_forward_fn

    def lent(self, loops: CaptureLoops, result: Any) -> Any:
        """Return what the target's loop shall return; here, it hands nothing to the draft."""
        del loops
        return result


def asked_once(loops: CaptureLoops, capturing: Capturing[Any], factory: Any) -> Any:
    """Wrap a factory that vLLM asks once for both phases: it is asked again in between.

    Args:
        loops: Of the runner.
        capturing: The capture of the pool whose loop it is.
        factory: Takes a descriptor, returns a forward, or a forward and its state.
    """

    def create_forward_fn(desc: Any) -> Any:
        made = loops.make(capturing, desc, Phase.WARMUP, lambda: factory(desc))
        if desc.cg_mode.name != "FULL":
            return made
        current, *state = made if isinstance(made, tuple) else (made,)
        warmed_up = False

        def forward(mode: Any) -> Any:
            nonlocal current, warmed_up
            result = current(mode)
            if not warmed_up:
                warmed_up = True
                # Now, and not at the next call, which vLLM makes within the capture.
                again = loops.make(capturing, desc, Phase.CAPTURE, lambda: factory(desc))
                current = again[0] if isinstance(again, tuple) else again
            return result

        return (forward, *state) if state else forward

    return create_forward_fn


class LendingFamily(Family):
    """Versions whose target's loop returns a mapping of states, which the draft's loop reads."""

    def lent(self, loops: CaptureLoops, result: Mapping[Any, Any]) -> Any:
        """Return a mapping that has each state built when it is looked up."""
        return LentStates(loops, result, self.shape)

    def shape(self, state: AttentionState) -> Any:
        """Make the value that the draft's loop expects."""
        raise NotImplementedError


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
