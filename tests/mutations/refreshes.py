"""Wrong versions of what makes a refresh short: a watched state, and whom a build spares."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_FILE = "tests/unit/test_same_state.py"
_ASSIGNED = f"{_FILE}::test_an_object_that_can_be_assigned_to_is_taken_apart_each_time"
_IN_PLACE = f"{_FILE}::test_a_tensor_changed_in_place_is_seen"

MUTATIONS = (
    # The object that was returned before.
    Mutation(
        "watch-any-container",
        "only what nobody can assign to is not taken apart again",
        "state/unmoved.py",
        "            if not _cannot_be_assigned_to(type(value)):\n",
        "            if False:\n",
        (_ASSIGNED,),
    ),
    Mutation(
        "watch-any-sequence",
        "a list can be assigned to, a tuple cannot",
        "state/unmoved.py",
        "return issubclass(cls, tuple)",
        "return True",
        (_ASSIGNED,),
    ),
    Mutation(
        "watch-what-has-a-dict",
        "a frozen dataclass with a __dict__ can be assigned to",
        "state/unmoved.py",
        "    if shape.has_dict:  # even",
        "    if False:  # even",
        (_ASSIGNED,),
    ),
    Mutation(
        "watch-unfrozen-dataclasses",
        "only frozen dataclasses cannot be assigned to",
        "state/unmoved.py",
        "parameters is not None and parameters.frozen",
        "True",
        (_ASSIGNED,),
    ),
    Mutation(
        "watch-what-inherits-frozenness",
        "a class below a frozen dataclass may have slots of its own",
        "state/unmoved.py",
        'vars(cls).get("__dataclass_params__")',
        'getattr(cls, "__dataclass_params__", None)',
        (_ASSIGNED,),
    ),
    Mutation(
        "watch-values-that-change",
        "a host value that changes in place is compared each time",
        "state/unmoved.py",
        "if not constant and value is not node.value:",
        "if False:",
        (_ASSIGNED, f"{_FILE}::test_a_value_equal_to_the_captured_one_may_change"),
    ),
    Mutation(
        "watch-no-addresses",
        "a tensor put elsewhere in place is seen",
        "state/unmoved.py",
        'f"{name}.data_ptr() != {writer.constant(node.address)}"',
        '"False"',
        (
            _IN_PLACE,
            f"{_FILE}::test_each_tensor_is_looked_at_and_may_come_back",
        ),
    ),
    Mutation(
        "watch-no-shapes",
        "a tensor of another shape or dtype is seen at its old address",
        "state/unmoved.py",
        '        conditions.append(f"not {guard}(*',
        '        list(f"not {guard}(*',
        (_IN_PLACE,),
    ),
    Mutation(
        "watch-no-host-data",
        "of host data the type and the device are looked at",
        "state/unmoved.py",
        "            conditions.append(function.tensor(node, name))\n",
        "            pass\n",
        (
            f"{_FILE}::test_host_data_is_looked_at_too",
            f"{_FILE}::test_without_guards_the_same_is_seen",
        ),
    ),
    Mutation(
        "watch-under-strict",
        'checks="strict" takes every state apart',
        "refreshing.py",
        "if state is not watch.state or record.order is not None or not watch.unmoved():",
        "if state is not watch.state or not watch.unmoved():",
        (f"{_FILE}::test_strict_takes_every_state_apart",),
    ),
    Mutation(
        "watch-another-object",
        "an object that is not the watched one is taken apart",
        "refreshing.py",
        "if state is not watch.state or record.order is not None or not watch.unmoved():",
        "if record.order is not None or not watch.unmoved():",
        (f"{_FILE}::test_another_object_is_taken_apart_and_learned_again",),
    ),
    Mutation(
        "watch-nothing",
        "the object that was returned before is not taken apart again",
        "watch.py",
        "unmoved = checker.watch(state) if again else None",
        "unmoved = None",
        (_IN_PLACE,),
    ),
    Mutation(
        "watch-old-memory",
        "a rebind leaves nothing that holds the old memory",
        "freshness.py",
        "            watch.reset()\n",
        "            pass\n",
        ("tests/contract/test_rebind.py::test_nothing_holds_the_old_memory",),
    ),
    Mutation(
        "watch-states-that-are-new-each-time",
        "an owner that returns new objects has none of them kept",
        "watch.py",
        "if unmoved is None and (again or self.chances <= 0):",
        "if unmoved is None and again:",
        (f"{_FILE}::test_new_objects_at_each_build_are_not_kept",),
    ),
    Mutation(
        "watch-only-what-the-lender-checks",
        "an unchecked pool's state is looked at for a borrower that checks",
        "freshness.py",
        "        self.wants_check = any(each.checked for each in self.leases)",
        "        self.wants_check = self.leases[0].checked if self.leases else False",
        (f"{_FILE}::test_a_borrower_that_checks_makes_an_unchecked_lender_look",),
    ),
    # Whom a build spares.
    Mutation(
        "spares-for-ever",
        "what a build may write, and where states lie, is looked at again when it changes",
        "freshness.py",
        "            spared.clear()\n",
        "            pass\n",
        (
            f"{_FILE}::test_an_owner_that_writes_more_than_it_did",
            f"{_FILE}::test_a_key_more_of_an_owner_that_may_write_all",
            f"{_FILE}::test_a_state_that_is_built_elsewhere_before_its_capture",
        ),
    ),
    Mutation(
        "spares-whom-it-overwrites",
        "a state that a build writes over is made stale at each build",
        "freshness.py",
        "        self.overwrite(by, key)\n        if not spared:\n",
        "        spared.update(record.serial for record in ledger.others(self))\n"
        "        self.overwrite(by, key)\n        if not spared:\n",
        (f"{_FILE}::test_another_owner_that_comes_into_the_memory_later",),
    ),
    Mutation(
        "spares-newcomers",
        "a state that was not there before is looked at",
        "freshness.py",
        "        if spared.issuperset(ledger.live):\n",
        "        if spared:\n",
        (f"{_FILE}::test_another_owner_that_comes_into_the_memory_later",),
    ),
    Mutation(
        "spares-while-declarations-grow",
        "an owner that declares more has it looked at",
        "freshness.py",
        "        self._memo.clear()\n        self.ledger.forget()\n        return True",
        "        self._memo.clear()\n        return True",
        (f"{_FILE}::test_an_owner_that_writes_more_than_it_did",),
    ),
    Mutation(
        "spares-while-declarations-move",
        "what a rebind moves of what an owner declares is looked at",
        "freshness.py",
        "        self.ledger.forget()\n        self.book.version",
        "        self.book.version",
        (f"{_FILE}::test_what_an_owner_declares_is_moved",),
    ),
    Mutation(
        "spares-while-states-move",
        "a state that is built elsewhere before its capture is looked at anew, and so is what an "
        "owner that declares nothing may write",
        "freshness.py",
        "        self.ledger.forget()\n        for watch",
        "        for watch",
        (
            f"{_FILE}::test_a_state_that_is_built_elsewhere_before_its_capture",
            f"{_FILE}::test_a_key_more_of_an_owner_that_may_write_all",
        ),
    ),
    Mutation(
        "spares-whoever-enters",
        "a state that became fresh since is looked at",
        "freshness.py",
        "        self.live[record.serial] = record.ref\n        self.arrivals += 1\n",
        "        self.live[record.serial] = record.ref\n",
        (f"{_FILE}::test_another_owner_that_comes_into_the_memory_later",),
    ),
    Mutation(
        "spares-what-was-forgotten",
        "what was forgotten is looked at again, also where nobody became fresh since",
        "freshness.py",
        "        self._remembered.clear()\n        self.arrivals += 1\n",
        "        self._remembered.clear()\n",
        (f"{_FILE}::test_what_an_owner_declares_is_moved",),
    ),
    # The rest of a refresh.
    Mutation(
        "one-borrower-is-granted",
        "each borrower is granted its replays",
        "freshness.py",
        "[each for each in self.leases if each.borrowed]",
        "[each for each in self.leases[:2] if each.borrowed]",
        (f"{_FILE}::test_borrowers_that_come_later_are_granted",),
    ),
    Mutation(
        "refused-builds-uncounted",
        "a build that was refused was a build",
        "statistics.py",
        "+ self.refreshes + self.refused",
        "+ self.refreshes",
        (f"{_FILE}::test_a_build_that_is_right_after_a_second_look_counts_once",),
    ),
    Mutation(
        "right-after-all-counted-as-refused",
        "a build that is right after a second look counts once",
        "refreshing.py",
        "    tally.refused -= 1\n",
        "",
        (f"{_FILE}::test_a_build_that_is_right_after_a_second_look_counts_once",),
    ),
)
