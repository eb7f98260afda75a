"""Recording a forward for the tape: two modes that watch it, and what they write down.

A dispatch mode sees every operator that runs, below autograd and autocast. A function mode sees
what never becomes an operator (``tolist``, ``numpy``, ``print`` of a tensor).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from graphshare.capture._operators import (
    Overload,
    generators_in,
    has_python_kernel,
    host_need,
    out_overload,
    resizes,
    written_tensors,
)
from graphshare.capture._tensors import (
    bytes_of,
    each_once,
    flat,
    frozen,
    generator_key,
    poison_byte,
    storage_key,
)
from graphshare.errors import CaptureError
from graphshare.memory import MemoryRanges

__all__ = ["Recompute", "Recording"]

Tensor = torch.Tensor

# What reads a tensor on the host without an operator: dispatch never hears of it.
_HOST_READS: Mapping[Any, str] = {
    Tensor.tolist: "a list on the host",
    Tensor.numpy: "a NumPy array",
    Tensor.__array__: "a NumPy array",
    Tensor.__dlpack__: "memory that others read",
    Tensor.__repr__: "a text of the values",
    Tensor.__reduce_ex__: "a pickle of the values",
    Tensor.cpu: "a copy on the host",
}

# Uninitialised memory is not worth an operator at each replay.
_UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty")
) | {"aten::new_empty_strided"}

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Recording:
    """What one forward did: the steps of a replay, and how to undo what recording changed.

    Args:
        generators: The generators that the forward may draw from.
        protected: Tensors that it may not write.

    Attributes:
        steps: What a replay calls, in order.
        operators: The operator of each step.
        created: The storages that the forward allocated, with the first dtype seen in each.
        refusal: The first thing refused; it stands even where the forward swallowed it.
    """

    def __init__(
        self, generators: Iterable[torch.Generator], protected: Sequence[torch.Tensor]
    ) -> None:
        self.steps: list[Callable[[], Any]] = []
        self.operators: list[Overload] = []
        self.created: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}
        self.refusal: CaptureError | None = None
        self._generators = {generator_key(g): (g, g.get_state()) for g in generators}
        self._protected = MemoryRanges.of(t for t in protected if t.device.type == "cpu")
        self._snapshots: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.host_scalar = False
        self.calling: Any = None

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run ``forward`` and write down what it does; put back what it changed, always."""
        dispatch, functions = _OperatorMode(self), _FunctionMode(self)
        dispatch.functions = functions
        try:
            with dispatch, functions:
                return forward()
        finally:
            self._undo()

    def clear(self) -> None:
        """Drop everything, so that a traceback that refers to this holds no memory."""
        self.steps.clear()
        self.operators.clear()
        self.created.clear()
        self._snapshots.clear()
        self.refusal = None
        self.calling = None

    def abandon(self) -> CaptureError | None:
        """Drop everything and return what was refused, if anything was."""
        refusal = self.refusal
        self.clear()
        return refusal

    def poison(self) -> None:
        """Make the contents of everything the forward allocated loud nonsense: NaN for floats."""
        for storage, dtype in self.created.values():
            bytes_of(storage).fill_(poison_byte(dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the forward allocated."""
        return sum(storage.nbytes() for storage, _ in self.created.values())

    def refuse(self, operator: Any, got: str, *, remedy: str = "", why: str = "") -> NoReturn:
        """Refuse a call, by name.

        Raises:
            CaptureError: Always.
        """
        named = str(operator) if isinstance(operator, Overload) else _name(operator)
        if self.calling is not None and self.calling is not operator:
            named = f"{_name(self.calling)} ({named})"
        error = CaptureError(
            f"the forward calls {named}",
            expected="work that stays on the device",
            got=got,
            consequence=why or "A replay would not do it again: what the host read stays frozen",
            remedy=remedy or "Compute it on the device, or before the capture",
        )
        self.refusal = self.refusal or error
        try:
            raise error
        finally:
            del error  # or this frame and the traceback would keep each other, and tensors, alive

    def write(self, op: Overload, tensor: Tensor) -> None:
        """Note that ``op`` is about to write ``tensor`` in place."""
        if self._protected and self._protected.overlaps(MemoryRanges.of([tensor])):
            self.refuse(
                op,
                "a write into the attention state",
                why="The state would no longer be what its owner built",
                remedy="Declare it: capture(..., writes_state=True)",
            )
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self.created and key not in self._snapshots:
            self._snapshots[key] = (storage, storage.clone())

    def knows(self, tensor: Tensor) -> bool:
        """Say whether the forward allocated this tensor's memory itself."""
        return storage_key(tensor.untyped_storage()) in self.created

    def may_draw(self, generator: torch.Generator) -> bool:
        """Say whether the state of this generator is put back after recording."""
        return generator_key(generator) in self._generators

    def record(
        self,
        op: Overload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        written: Sequence[Tensor],
    ) -> None:
        """Write down a call that has just run."""
        read = {storage_key(t.untyped_storage()) for t in flat((args, tuple(kwargs.values())))}
        results = list(flat(result))
        fresh = [
            (place, t)
            for place, t in enumerate(results)
            if t.device.type == "cpu" and storage_key(t.untyped_storage()) not in read
        ]
        for _, tensor in fresh:
            storage = tensor.untyped_storage()
            self.created.setdefault(storage_key(storage), (storage, tensor.dtype))
        returns = op._schema.returns
        if not fresh and not written and returns:
            return  # a view, or facts about shapes
        if fresh and op._schema.name in _UNINITIALISED:
            return
        call_args, call_kwargs = frozen(args), frozen(kwargs)
        self.operators.append(op)
        if not fresh:
            self.steps.append(functools.partial(op.op, *call_args, **call_kwargs))
            return
        targets = [(place, tensor.detach()) for place, tensor in fresh]
        out = None
        if not written and len(fresh) == len(results) == len(returns):
            out = _out_of(op, [tensor for _, tensor in targets])
        if out is not None:
            out_op, outs = out
            self.steps.append(functools.partial(out_op.op, *call_args, **call_kwargs, **outs))
        else:
            call = functools.partial(op.op, *call_args, **call_kwargs)
            self.steps.append(Recompute(op, call, targets))

    def _undo(self) -> None:
        for generator, state in self._generators.values():
            generator.set_state(state)
        for storage, before in self._snapshots.values():
            if storage.nbytes() == before.nbytes():
                bytes_of(storage).copy_(bytes_of(before))


class _OperatorMode(TorchDispatchMode):
    """Runs each operator and records it.

    Attributes:
        functions: The function mode beside it, for Python that runs where it is switched off.
    """

    functions: TorchFunctionMode | None

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.functions = None
        self._recording = recording

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass unwraps itself; its plain tensors come by again
        recording, kwargs, op = self._recording, kwargs or {}, func
        if op._can_decompose():  # under inference mode composites arrive whole
            with self:
                result = op.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if has_python_kernel(op, "cpu"):
            # Its Python must not run at a replay, so what it calls is recorded in its place.
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
            with self, self.functions or contextlib.nullcontext():
                return op.redispatch(keys, *args, **kwargs)
        self._check(op, args, kwargs)
        written = [t for t in written_tensors(op, args, kwargs) if t.device.type == "cpu"]
        if resizes(op):
            if not recording.knows(args[0]):
                recording.refuse(
                    op,
                    "another size or storage for a tensor from outside the forward",
                    why="Captured addresses must stay",
                    remedy="Allocate it at its final size before the capture",
                )
            return op(*args, **kwargs)
        self._check_outs(op, args, kwargs)
        if torch.Tag.inplace_view in op.tags:
            return op(*args, **kwargs)  # changes a view's shape, no memory
        for tensor in written:
            recording.write(op, tensor)
        result = op(*args, **kwargs)
        recording.record(op, args, kwargs, result, written)
        return result

    def _check(self, op: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording = self._recording
        need = host_need(op, args, kwargs, host_scalar=recording.host_scalar)
        if need is not None:
            recording.refuse(op, need)
        for tensor in flat((args, tuple(kwargs.values()))):
            if tensor.device.type not in ("cpu", "meta") or tensor.layout is not torch.strided:
                recording.refuse(op, f"a {tensor.layout} tensor on {tensor.device}")
        for generator in generators_in(args, kwargs):
            if not recording.may_draw(generator):
                recording.refuse(
                    op,
                    "a generator that is not registered",
                    why="Its state could not be kept apart from the capture",
                    remedy="Name it when the backend is made: generators=[...]",
                )

    def _check_outs(self, op: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an ``out=`` that the operator would resize, before it is too late."""
        recording = self._recording
        names = [a.name for a in op._schema.arguments if a.is_out]
        outs = {n: kwargs[n] for n in names if isinstance(kwargs.get(n), Tensor)}
        if all(recording.knows(out) for out in outs.values()):
            return
        trial = {name: out.detach().clone() for name, out in outs.items()}
        op(*args, **{**kwargs, **trial})
        if any(trial[name].shape != out.shape for name, out in outs.items()):
            recording.refuse(
                op,
                "an out= tensor of another shape",
                why="It would be resized, and captured addresses must stay",
                remedy="Allocate it at its final size before the capture",
            )


class _FunctionMode(TorchFunctionMode):
    """Refuses what reads a tensor on the host without an operator."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        recording = self._recording
        if isinstance(func, Overload):  # called from the operator mode
            return func(*args, **(kwargs or {}))
        before = recording.calling, recording.host_scalar
        recording.calling = func
        need = _HOST_READS.get(func)
        if need is not None:
            recording.refuse(func, need)
        # x[1:] = 1.0 fills on the device, though PyTorch makes a tensor of the number first; for
        # one element it copies that tensor from the host, and CUDA refuses it.
        recording.host_scalar = (
            func == Tensor.__setitem__
            and isinstance(args[2], (bool, int, float, complex))
            and not _is_one_element(args[0], args[1])
            and not _from_host(args[1])
        )
        try:
            return func(*args, **(kwargs or {}))
        finally:
            recording.calling, recording.host_scalar = before


class Recompute:
    """Calls an operator again and copies its results to where they were when recorded.

    Attributes:
        op: The operator.
        call: The call.
        targets: Place among the results, and where that one goes.
    """

    __slots__ = ("call", "op", "targets")

    def __init__(
        self, op: Overload, call: functools.partial[Any], targets: Sequence[tuple[int, Tensor]]
    ) -> None:
        self.op = op
        self.call = call
        self.targets = targets

    def __call__(self) -> None:
        results = list(flat(self.call()))
        for place, target in self.targets:
            result = results[place]
            if result.shape != target.shape:
                raise CaptureError(
                    f"replay of {self.op}",
                    expected=f"shape {tuple(target.shape)} as when captured",
                    got=f"{tuple(result.shape)}",
                    consequence="A shape that depends on the data cannot be captured",
                    remedy="Make the operator return one shape whatever the data",
                )
            each_once(target).copy_(each_once(result))


def _out_of(op: Overload, targets: list[Tensor]) -> tuple[Overload, dict[str, Tensor]] | None:
    found = out_overload(op)
    # An expanded result cannot be an out= tensor: several of its elements share memory.
    if found is None or any(each_once(target) is not target for target in targets):
        return None
    out_op, names = found
    return out_op, dict(zip(names, targets, strict=True))


def _is_one_element(tensor: Tensor, index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return len(items) == tensor.ndim and all(type(item) is int for item in items)


def _from_host(index: Any) -> bool:
    if isinstance(index, tuple):
        return any(_from_host(item) for item in index)
    return isinstance(index, (list, range)) or (
        hasattr(index, "__array__") and not isinstance(index, Tensor)
    )


def _name(function: Any) -> str:
    return resolve_name(function) or getattr(function, "__qualname__", repr(function))
