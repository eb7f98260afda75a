"""What stands for a manager's ``dispatch``, which chooses what a batch runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["NOT_GIVEN", "Remembering", "as_target", "ask", "packing", "unpacking"]

NOT_GIVEN: Any = object()
"""Of the adapters that a ``dispatch`` is asked about, before 0.25."""


def ask(
    dispatch: Callable[..., Any],
    num_reqs: Any,
    num_tokens: Any,
    uniform_token_count: Any,
    num_active_loras: Any,
) -> Any:
    """Ask a manager's ``dispatch`` as vLLM asks it, about adapters if they are given."""
    if num_active_loras is NOT_GIVEN:
        return dispatch(num_reqs, num_tokens, uniform_token_count)
    return dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras=num_active_loras)


def packing(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Take any arguments after the first two, and hand them on as one; see :func:`unpacking`."""

    def packed(num_reqs: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatch(num_reqs, num_tokens, (args, kwargs))

    return packed


def unpacking(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Undo what :func:`packing` has done."""

    def unpacked(num_reqs: Any, num_tokens: Any, more: Any) -> Any:
        args, kwargs = more
        return dispatch(num_reqs, num_tokens, *args, **kwargs)

    return unpacked


class Remembering:
    """A manager's ``dispatch`` that answers at once what it was asked the time before.

    Most steps ask for what the step before has asked, and the answer hangs on nothing else: the
    tables that it comes from are made by ``__init__`` and the capture alone (0.25.1,
    ``cudagraph_utils.py`` 141 to 287 and 368).

    Args:
        dispatch: vLLM's own, see :func:`.signatures.is_released`: somebody else's may hang on other
            things.

    Attributes:
        dispatch: Takes and returns what vLLM's does.
    """

    __slots__ = ("dispatch", "forget")

    def __init__(self, dispatch: Callable[..., Any]) -> None:
        known: tuple[Any, Any, Any, Any, Any] | None = None
        remembers = True

        # Arguments one by one: to collect and compare them takes as long as all else.
        def dispatched(
            num_reqs: Any,
            num_tokens: Any,
            uniform_token_count: Any,
            num_active_loras: Any = NOT_GIVEN,
        ) -> Any:
            nonlocal known
            last = known  # once: another thread may tell it to forget
            if last is not None:
                reqs, tokens, uniform, loras, answer = last
                if (
                    num_tokens == tokens
                    and num_reqs == reqs
                    and uniform_token_count == uniform
                    and num_active_loras == loras
                    and remembers
                ):
                    return answer
            answer = ask(dispatch, num_reqs, num_tokens, uniform_token_count, num_active_loras)
            if remembers:
                known = num_reqs, num_tokens, uniform_token_count, num_active_loras, answer
            return answer

        def forget() -> None:
            nonlocal known, remembers
            known, remembers = None, False

        self.dispatch = dispatched
        self.forget: Callable[[], None] = forget
        """From now on, ask each time."""


def as_target(manager: Any, mode: Any, desc: Any, num_reqs: int, num_tokens: int) -> Any:
    """Return what the draft's manager has for the mode that the target ran in."""
    kind, modes = type(desc), type(desc.cg_mode)
    if mode is modes.PIECEWISE:
        for each in manager._capture_descs.get(mode, ()):
            if each.num_tokens == num_tokens:
                return each
    return kind(cg_mode=modes.NONE, num_tokens=num_tokens, num_reqs=num_reqs)
