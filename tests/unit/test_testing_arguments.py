"""What ``check_owner`` is given is taken as it is meant, or refused before anything is built."""

from __future__ import annotations

import math

import pytest
import torch

from graphshare.testing import check_owner
from tests.planted_owners import KEYS, Honest, NothingForCaptures, StalePadding, batches
from tests.small_engine import Batch

BIG, MIDDLE, SMALL = KEYS


class Untouched:
    """Fails the test if it is built."""

    def build(self, key, batch, phase):
        raise AssertionError


def refused(kind, *parts, owner=None, keys=KEYS, given=batches, **options):
    with pytest.raises(kind) as caught:
        check_owner(Untouched() if owner is None else owner, keys, given, **options)
    for part in parts:
        assert part in str(caught.value)


def test_a_class_is_no_owner():
    refused(TypeError, "owner: expected an instance", "Honest(...)", owner=Honest)


def test_a_class_that_builds_itself_is_an_owner():
    class Own:
        held = Honest()

        @classmethod
        def build(cls, key, batch, phase):
            return cls.held.build(key, batch, phase)

        host_values = Honest.host_values

    report = check_owner(Own, KEYS, batches)
    assert report.ok
    assert report.owner == "Own"


def test_a_build_of_other_arguments():
    class NoPhase:
        def build(self, key, batch):
            raise AssertionError

    refused(TypeError, "build(key, batch, phase)", "build(key, batch) of NoPhase", owner=NoPhase())


@pytest.mark.parametrize("keys", [BIG, "abc", b"xyz", 8, None, torch.tensor(3), Batch((3,))])
def test_one_key_where_several_are_expected(keys):
    refused(TypeError, "keys: expected keys", "list", keys=keys)


def test_keys_that_cannot_be_hashed():
    refused(TypeError, "keys: expected what can be hashed", keys=[[8], [4]])


ONE_BATCH = [Batch((3,)), "abc", 3, None, torch.tensor([3, 4])]


@pytest.mark.parametrize("batch", ONE_BATCH)
def test_one_batch_where_several_are_expected(batch):
    for given in (batch, {BIG: batch}, lambda key: batch):
        refused(TypeError, "batches", "expected batches", given=given)
        refused(TypeError, "impossible", "expected batches", impossible=given)


def test_a_mapping_that_is_one_batch():
    refused(TypeError, "expected batches", given={BIG: {"seq_lens": [3]}})
    refused(ValueError, "expected keys that are checked", given={"seq_lens": [3]})


@pytest.mark.parametrize("given", [(), {}, {BIG: []}, lambda key: [], iter(())])
def test_without_any_batch_nothing_could_be_said(given):
    refused(ValueError, "batches: expected at least one", given=given)


@pytest.mark.parametrize("device", ["cpus", "", 1.5, object()])
def test_a_device_that_there_is_not(device):
    refused(ValueError, "device: expected one such as", device=device)


def test_a_forward_that_cannot_be_called():
    refused(TypeError, "forward: expected forward(key, state)", forward="plan")


@pytest.mark.parametrize(
    ("bounds", "kind"),
    [
        ("*.seq_lens", TypeError),
        (["*.seq_lens"], TypeError),
        ({"*.seq_lens": 5}, TypeError),
        ({"*.seq_lens": (1,)}, TypeError),
        ({"*.seq_lens": (1, 2, 3)}, TypeError),
        ({"*.seq_lens": "19"}, TypeError),
        ({"*.seq_lens": (None, 9)}, TypeError),
        ({5: (1, 9)}, TypeError),
        ({"*.seq_lens": (9, 1)}, ValueError),
        ({"*.seq_lens": (1, math.nan)}, ValueError),
    ],
)
def test_bounds_that_cannot_be_meant(bounds, kind):
    refused(kind, "bounds: expected", bounds=bounds)


@pytest.mark.parametrize("name", ["scratch", "allow"])
@pytest.mark.parametrize("given", [[5], 5, [None], b"padding", [b"padding"]])
def test_patterns_are_strings(name, given):
    refused(TypeError, f"{name}: expected strings", **{name: given})


def test_a_string_is_one_pattern():
    """Its characters would be patterns too, ``*`` among them, which names everything."""
    found = check_owner(StalePadding(), KEYS, batches, scratch="*_workspace")
    assert {each.check for each in found.rejections} == {"padding"}
    scratch = check_owner(NothingForCaptures(), KEYS, batches, scratch="*.block_table")
    assert scratch.ok
    allowed = check_owner(StalePadding(), KEYS, batches, allow="padding:*.block_table")
    assert allowed.ok
