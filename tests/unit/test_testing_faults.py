"""Planted faults are each rejected for the right reason, and for no other."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from graphshare.testing import CHECKS, check_owner
from tests.planted_owners import (
    BOUNDS,
    FAULTS,
    KEYS,
    Declares,
    ForgetsToReturn,
    ForgetsToReturnBatches,
    Honest,
    OnMeta,
    Reads,
    ReturnsArrays,
    ReturnsTheBuffer,
    batches,
    impossible,
    plan,
)

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check(owner, **options):
    given = {"forward": plan, "impossible": impossible, "bounds": BOUNDS, **options}
    return check_owner(owner, KEYS, batches, **given)


def fails(report):
    return {each.check for each in report.rejections}


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("owner", [Honest, Declares])
def test_an_honest_owner_conforms(owner, device):
    report = check(owner(device))
    assert report.rejections == ()
    assert report.ok


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("owner", FAULTS, ids=lambda owner: owner.__name__)
def test_a_planted_fault_is_rejected_for_its_reason_alone(owner, device):
    report = check(owner(device))
    assert fails(report) == {FAULTS[owner]}, str(report)
    assert not report.ok


@pytest.mark.parametrize("owner", FAULTS, ids=lambda owner: owner.__name__)
def test_a_fault_that_is_allowed_is_reported_as_such(owner):
    report = check(owner(), allow=[FAULTS[owner]])
    assert report.ok
    assert {each.check for each in report.allowed} == {FAULTS[owner]}


def test_every_check_has_a_planted_fault():
    elsewhere = {"forward", "host-sync"}  # below
    assert {*FAULTS.values()} | elsewhere == CHECKS.keys()


def test_a_forward_that_fails_on_what_a_warmup_gets():
    def forward(key, state):
        raise IndexError

    assert fails(check(Honest(), forward=forward)) == {"forward"}


@pytest.mark.parametrize(
    ("owner", "path", "got"),
    [
        (
            ReturnsTheBuffer,
            "slot_mapping",
            "the buffer 'slot_mapping' itself from a build for WARMUP",
        ),
        (OnMeta, "mask", "a tensor on meta from a build for WARMUP"),
        (ForgetsToReturn, "", "None from a build for WARMUP"),
        (ForgetsToReturnBatches, "", "None from a build for REPLAY"),
        (ReturnsArrays, "", "dict without any from a build for WARMUP"),
    ],
)
def test_what_is_no_state_is_named(owner, path, got):
    (found,) = check(owner()).rejections
    assert (found.path, found.got) == (path, got)
    assert set(found.keys) == set(KEYS)


def test_tensors_without_contents_alone():
    class Meta:
        def build(self, key, batch, phase):
            return torch.empty(8, device="meta")

    (rejection,) = check(Meta()).rejections
    assert rejection.check == "state"
    assert rejection.got.startswith("a tensor on meta ")


def test_what_no_kernel_reads_may_lie_anywhere():
    class Declared(OnMeta):
        host_values: ClassVar[dict[str, str]] = {**Honest.host_values, "mask": "any"}

    assert check(Declared()).ok


@pytest.mark.gpu
def test_a_build_that_waits_for_the_device():
    report = check(Reads("cuda"))
    assert fails(report) == {"host-sync"}
    assert "planted_owners.py" in report.rejections[0].got
    assert torch.cuda.get_sync_debug_mode() == 0


def test_without_a_gpu_the_report_says_what_was_not_checked():
    assert "host-sync" in check(Honest("cpu")).not_checked
