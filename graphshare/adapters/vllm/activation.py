"""The one patch of a class: vLLM's worker tells that its runner is about to capture."""

from __future__ import annotations

import functools
import logging
import weakref
from types import MappingProxyType, ModuleType
from typing import Any

from graphshare.adapters.vllm.arrival import when_imported
from graphshare.adapters.vllm.family import Family
from graphshare.adapters.vllm.patches import Patches
from graphshare.adapters.vllm.session import Session, VllmStatistics, When
from graphshare.adapters.vllm.support import why_not
from graphshare.adapters.vllm.switch import Mode
from graphshare.adapters.vllm.versions import find_family

__all__ = ["activate", "deactivate", "sessions", "statistics"]

_SESSION = "_graphshare_session"
_WORKER = "vllm.v1.worker.gpu_worker"
# vLLM shows what its own loggers say; graphshare installs no handler.
_logger = logging.getLogger("vllm.graphshare")


class _Activation:
    """What :func:`activate` has set up in this process."""

    def __init__(self, mode: Mode, when: When | None) -> None:
        self.mode, self.when = mode, when
        self.version = self.reason = ""
        # A runner holds its session, so that the two go together.
        self._sessions: list[weakref.ref[Session]] = []
        self._patches = Patches()
        self._ended = False
        self._stop_waiting = when_imported(_WORKER, self._worker_arrived)

    def sessions(self) -> tuple[Session, ...]:
        found = [session for ref in self._sessions if (session := ref()) is not None]
        return tuple(found)

    def undo(self) -> None:
        self._ended = True
        self._stop_waiting()
        self._patches.undo()
        for session in self.sessions():
            session.close()
        self._sessions.clear()

    def _worker_arrived(self, module: ModuleType) -> None:
        family, found = find_family()
        if family is None:
            self._leave_alone(found)
            return
        original = module.Worker.compile_or_warm_up_model

        @functools.wraps(original)
        def compile_or_warm_up_model(worker: Any) -> Any:
            if self._ended:  # somebody wrapped this one, so that it stayed
                return original(worker)
            with Patches() as patches:
                self._runner_captures(worker.model_runner, family, patches)
                return original(worker)

        self._patches.set(module.Worker, "compile_or_warm_up_model", compile_or_warm_up_model)

    def _leave_alone(self, reason: str) -> None:
        self.reason = reason
        _logger.warning("graphshare leaves this vLLM as it is: %s", reason)

    def _runner_captures(self, runner: Any, family: Family, patches: Patches) -> None:
        reason = why_not(runner, family)
        if reason is not None:
            self._leave_alone(reason)
            return
        self.version = family.version
        patches.set(runner, "capture_model", functools.partial(self._capture, runner, family))

    def _capture(self, runner: Any, family: Family) -> Any:
        before: Session | None = getattr(runner, _SESSION, None)
        if before is not None:
            before.close()
            self._sessions = [ref for ref in self._sessions if ref() is not before]
        session = Session(runner, family, self.mode, when=self.when)
        # Of the class: the instance has this very function.
        result = session.capture(functools.partial(type(runner).capture_model, runner))
        setattr(runner, _SESSION, session)
        self._sessions.append(weakref.ref(session))
        return result


_activation: _Activation | None = None


def activate(mode: Mode | str = Mode.ON, *, when: When | None = None) -> None:
    """Take part in each vLLM runner of this process that captures from now on.

    Imports nothing of vLLM. A second call with the same mode does nothing; the plug-in is called
    several times.

    Args:
        mode: As ``GRAPHSHARE_VLLM``.
        when: As for :func:`graphshare.share_states`; keys are vLLM's ``BatchExecutionDescriptor``.

    Raises:
        ValueError: There is no such mode.
        RuntimeError: It is active in another mode; deactivate first.
    """
    global _activation
    mode = Mode(mode)
    if _activation is not None:
        if _activation.mode is not mode:
            raise RuntimeError(
                f"graphshare is active in vLLM with mode {_activation.mode.value!r}, "
                f"asked for {mode.value!r}. Call deactivate first."
            )
        return
    if mode is not Mode.OFF:
        _activation = _Activation(mode, when)


def deactivate() -> None:
    """Undo everything: vLLM runs as it would without graphshare, on the graphs that it captured.

    Pools of your own over vLLM's metadata go on looking at its fields alone.
    """
    global _activation
    done, _activation = _activation, None
    if done is not None:
        done.undo()


def sessions() -> tuple[Session, ...]:
    """Return what graphshare is to each runner of this process, oldest first."""
    return () if _activation is None else _activation.sessions()


def statistics() -> VllmStatistics:
    """Return what graphshare has done in this process, for the runner that captured last.

    vLLM's worker may be another process than the one that asks: see the how-to page.
    """
    found = sessions()
    if found:
        return found[-1].statistics()
    none = MappingProxyType[str, Any]({})
    active = _activation
    return VllmStatistics(
        version=active.version if active else "",
        mode=(active.mode if active else Mode.OFF).value,
        active=False,
        reason=(active.reason if active else "") or "no runner has captured in this process",
        builds_avoided=0,
        builds=none,
        refusals=none,
        verified=0,
        steered=0,
        graphs=none,
        borrowed=0,
        graph_bytes=0,
        pools=none,
    )
