"""Which checks a state needs: its nodes, each with the rule that its path gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphshare.state import nest
from graphshare.state.nest import Step, label, too_many_leaves
from graphshare.state.nodes import BranchNode, Node, TensorNode
from graphshare.state.rules import RuleSet

__all__ = ["Check", "plan"]


class Check:
    """What to check of one node; one object wherever node and rules are the same.

    Attributes:
        node: The node.
        rule: The rule of a leaf. ``"any"`` for a container: do not look inside.
        parts: The checks one step down; for a step back up, the container's node.
        uses: How many checks have this one as a part.
    """

    __slots__ = ("node", "parts", "rule", "uses")

    def __init__(self, node: Node, rule: str) -> None:
        self.node = node
        self.rule = rule
        self.parts: dict[Step, Check | BranchNode] = {}
        self.uses = 0


class _Frame:
    __slots__ = ("index", "node", "parts", "path", "pending", "steps")

    def __init__(self, node: BranchNode, path: str, index: int) -> None:
        self.node = node
        self.path = path
        self.index = index
        self.steps: Iterator[tuple[Step, Node]] = iter(node.below.items())
        self.parts: dict[Step, Check | BranchNode] = {}
        self.pending: Step | None = None  # the step that the frame on top of this one is for


class _Planner:
    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules
        self.checks: dict[Any, Check] = {}
        self.done: dict[tuple[int, int, str], Check] = {}
        self.frames: list[_Frame] = []
        self.around: set[int] = set()
        self.visits = 0

    def leaf(self, node: Node, rule: str) -> Check:
        name: Any = (id(node), rule)
        if rule != "any" and isinstance(node, TensorNode):
            # A build may slice anew for each layer: equal views are one check, too.
            place = (node.role, node.address, node.shape, node.stride, node.dtype, node.device)
            name = (place, rule)
        check = self.checks.get(name)
        if check is None:
            check = self.checks[name] = Check(node, rule)
        return check

    def enter(self, node: Node, path: str, index: int) -> Check | BranchNode | None:
        """The check for ``node``; ``None`` if a frame was opened, which will tell."""
        self.visits += 1
        if self.visits > nest.MAX_LEAVES:
            raise too_many_leaves(path)
        rules = self.rules
        if not isinstance(node, BranchNode):
            return self.leaf(node, rules.rule(path, index) if rules else "equal")
        if id(node) in self.around:
            return node
        if rules:
            index = rules.within(path, index)
            if rules.leaves_out(index):
                return self.leaf(node, "any")
        done = self.done.get((id(node), index, rules.context(path)))
        if done is not None:
            return done
        self.around.add(id(node))
        self.frames.append(_Frame(node, path, index))
        return None

    def leave(self) -> Check:
        frame = self.frames.pop()
        self.around.discard(id(frame.node))
        name = (id(frame.node), tuple(map(id, frame.parts.values())))
        check = self.checks.get(name)
        if check is None:
            check = self.checks[name] = Check(frame.node, "equal")
            check.parts = frame.parts
            for part in frame.parts.values():
                if isinstance(part, Check):
                    part.uses += 1
        self.done[id(frame.node), frame.index, self.rules.context(frame.path)] = check
        return check

    def run(self, root: Node) -> Check:
        ready = self.enter(root, "", self.rules.ceiling)
        while self.frames:
            frame = self.frames[-1]
            for step, node in frame.steps:
                path = ""
                if self.rules:
                    name = label(frame.node.cls, step)
                    path = f"{frame.path}.{name}" if frame.path else name
                ready = self.enter(node, path, frame.index)
                if ready is None:
                    frame.pending = step
                    break
                frame.parts[step] = ready
            else:
                ready = self.leave()
                if self.frames:
                    above = self.frames[-1]
                    if above.pending is not None:
                        above.parts[above.pending] = ready
        if not isinstance(ready, Check):
            raise RuntimeError("graphshare: the plan of a state has no root")
        return ready


def plan(root: Node, rules: RuleSet) -> Check:
    """The checks for a state with nodes from ``root``.

    Raises:
        ValueError: Rules apply to more than a million leaves.
    """
    return _Planner(rules).run(root)
