"""Owners that are correct by construction conform; each with one fault is rejected for it alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from graphshare.testing import check_owner
from tests.property.generated_owners import Owner, cases, faulty_cases


@settings(max_examples=10 * settings.default.max_examples)
@given(cases())
def test_no_false_alarm(case):
    plan, batches = case
    owner = Owner(plan)
    report = check_owner(owner, plan.keys, batches)
    assert report.rejections == (), str(report)


@settings(max_examples=2 * settings.default.max_examples)
@given(faulty_cases())
def test_one_fault_is_rejected_for_its_reason(case):
    plan, batches = case
    report = check_owner(Owner(plan), plan.keys, batches)
    assert {each.check for each in report.rejections} == {plan.fault}, str(report)


@given(cases())
def test_what_an_owner_wrote_once_and_for_all_is_still_there(case):
    plan, batches = case
    owner = Owner(plan)
    constants = {name: owner.memory[name].clone() for name in owner.memory if name[0].constant}
    check_owner(owner, plan.keys, batches)
    for name, before in constants.items():
        assert torch.equal(owner.memory[name], before)
