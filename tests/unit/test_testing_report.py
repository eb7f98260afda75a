"""What a conformance report says, what it takes, and what it refuses."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from graphshare import BatchDescriptor
from graphshare.testing import CHECKS, OwnerDoesNotConform, assert_owner_conforms, check_owner
from tests.one_buffer import Apart
from tests.package import ROOT
from tests.planted_owners import (
    KEYS,
    BatchShaped,
    Declares,
    FreshTensor,
    Honest,
    OneObject,
    StalePadding,
    batches,
    plan,
)
from tests.small_engine import Batch

BIG, MIDDLE, SMALL = KEYS


def facts(report):
    return {fact.name: fact for fact in report.facts}


def test_a_rejection_carries_its_facts():
    report = check_owner(StalePadding(), KEYS, batches)
    (rejection,) = report.rejections
    assert rejection.check == "padding"
    assert rejection.path == "attn.block_table"
    assert set(rejection.keys) == set(KEYS)
    assert rejection.batch in (1, 2)  # the first one leaves no padding
    assert rejection.consequence == CHECKS["padding"].consequence
    assert rejection.remedy == CHECKS["padding"].remedy


def test_a_report_prints_what_it_holds():
    report = check_owner(BatchShaped(), KEYS, batches)
    text = str(report)
    assert text.startswith("BatchShaped does not conform, 1 rejection: 3 keys, 9 batches, ")
    for word in ("layout: slot_mapping", "not checked", "host-sync", "overwrites", str(BIG)):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    assert "does not conform" not in str(check_owner(Honest(), KEYS, batches))


def test_the_report_of_a_failure_travels_with_it():
    with pytest.raises(AssertionError) as caught:
        assert_owner_conforms(FreshTensor(), KEYS, batches)
    assert isinstance(caught.value, OwnerDoesNotConform)
    assert caught.value.report.rejections[0].check == "allocation"
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.report == caught.value.report
    assert str(copied) == str(caught.value)


def test_what_is_allowed_is_allowed_by_check_and_path():
    for allow in ("padding", ["padding:*.block_table"], ["padding:attn"]):
        report = check_owner(StalePadding(), KEYS, batches, allow=allow)
        assert report.ok
        assert [each.check for each in report.allowed] == ["padding"]
        assert "allowed" in str(report)
    assert not check_owner(StalePadding(), KEYS, batches, allow=["padding:*.seq_lens"]).ok
    with pytest.raises(ValueError, match="padding"):
        check_owner(Honest(), KEYS, batches, allow=["paddings"])


def test_batches_by_key_by_function_or_for_all():
    by_key = {key: batches(key) for key in KEYS}
    assert check_owner(Honest(), KEYS, by_key).num_batches == 9
    assert check_owner(Honest(), KEYS, {BIG: batches(BIG)}).num_batches == 3
    assert check_owner(Honest(), KEYS, [Batch((3,)), Batch((2, 2))]).num_batches == 6
    with pytest.raises(ValueError, match="batches"):
        check_owner(Honest(), [BIG], by_key)


def test_with_one_batch_nothing_can_be_seen_to_be_frozen():
    report = check_owner(Honest(), KEYS, {BIG: batches(BIG), SMALL: [Batch((3,))]})
    assert "frozen-value" in report.not_checked
    assert "frozen-value" not in check_owner(Honest(), KEYS, batches).not_checked


@pytest.mark.parametrize("keys", [[], [BIG, SMALL, BIG]])
def test_keys_that_make_no_sense(keys):
    with pytest.raises(ValueError, match="keys"):
        check_owner(Honest(), keys, batches)


def test_an_owner_without_build():
    with pytest.raises(TypeError, match="build"):
        check_owner(object(), KEYS, batches)


def test_a_device_on_which_nothing_lies():
    with pytest.raises(ValueError, match="device"):
        check_owner(Honest(), KEYS, batches, device="meta")


def test_a_state_without_tensors():
    class HostOnly:
        def build(self, key, batch, phase):
            return {"page_size": 16}

    report = check_owner(HostOnly(), KEYS, [0, 1])
    assert {each.check for each in report.rejections} == {"state"}
    assert report.rejections[0].keys == tuple(KEYS)
    assert check_owner(HostOnly(), KEYS, [0, 1], allow="state").ok


@pytest.mark.parametrize("patterns", [["*"], ["*.seq_lens", "*.block_table", "slot_mapping"]])
def test_a_state_of_which_no_graph_reads_a_tensor(patterns):
    class Ignored(Honest):
        host_values = {**dict.fromkeys(patterns, "any"), **Honest.host_values}

    report = check_owner(Ignored(), KEYS, batches, bounds={"*.seq_lens": (1, 9)})
    assert {each.check for each in report.rejections} == {"state"}
    assert report.rejections[0].keys == tuple(KEYS)
    assert report.rejections[0].got == "3 with the rule any"
    assert "no tensor found" in report.not_checked["bounds"]


def test_keys_of_any_kind():
    class ByNumber:
        def __init__(self):
            self.lengths = torch.zeros(8, dtype=torch.int32)

        def build(self, key, batch, phase):
            if batch is not None and len(batch) > key:
                raise ValueError
            self.lengths[:key] = 1
            if batch is not None:
                self.lengths[: len(batch)] = torch.tensor(batch, dtype=torch.int32)
            return self.lengths[:key]

    given = {8: [[2] * 8, [3, 4]], 4: [[5], [6] * 4]}
    impossible = {4: [[1] * 5], 8: [[1] * 9]}
    report = assert_owner_conforms(ByNumber(), [8, 4], given, impossible=impossible)
    assert report.keys == (8, 4)
    assert "impossible" not in report.not_checked


def test_whose_state_is_overwritten_is_a_fact():
    shared = facts(check_owner(Honest(), KEYS, batches))["overwrites"]
    assert {key: set(others) for key, others in shared.details.items()} == {
        key: set(KEYS) - {key} for key in KEYS
    }
    apart = check_owner(Apart(), KEYS, [1.0, 2.0])
    assert facts(apart)["overwrites"].details == {}


def test_whether_a_warmup_has_objects_of_its_own_is_a_fact():
    assert "separate-objects" in facts(check_owner(Honest(), KEYS, batches))
    report = check_owner(OneObject(), KEYS, batches)
    assert "attn" in facts(report)["same-objects"].details
    assert report.ok  # without a forward nothing shows that it matters
    assert not check_owner(OneObject(), KEYS, batches, forward=plan).ok


def test_a_rule_that_names_nothing_is_a_fact():
    class Misnamed(Honest):
        host_values = {**Honest.host_values, "*.max_seqlen": "at_most"}

    assert facts(check_owner(Misnamed(), KEYS, batches))["unused-rule"].details.keys() == {
        "*.max_seqlen"
    }


def test_a_footprint_can_only_be_checked_where_it_is_declared():
    assert "footprint" in check_owner(Honest(), KEYS, batches).not_checked
    assert "footprint" not in check_owner(Declares(), KEYS, batches).not_checked


def test_the_state_holds_a_valid_build_afterwards():
    owner = Honest()
    check_owner(owner, KEYS, batches)
    assert owner.seq_lens.tensor.tolist() == [1] * 8
    assert owner.block_table.tensor.eq(0).all()


def test_an_owner_that_fails_everywhere_is_told_so():
    class Fails:
        def build(self, key, batch, phase):
            raise NotImplementedError

    report = check_owner(Fails(), [BatchDescriptor(4)], [1, 2])
    assert {each.check for each in report.rejections} == {"build"}


def test_a_tensor_without_an_address():
    class Sparse(Honest):
        """Only some batches give a sparse tensor."""

        def build(self, key, batch, phase):
            state = super().build(key, batch, phase)
            if key == SMALL or (batch is not None and batch.num_reqs == 1):
                state["mask"] = torch.eye(2).to_sparse()
            return state

    report = check_owner(Sparse(), KEYS, batches)
    assert {each.check for each in report.rejections} == {"layout"}
    assert report.rejections[0].keys[0] == SMALL


_TESTS = """
from tests.planted_owners import KEYS, FreshTensor, Honest, batches

def test_good(owner_conforms):
    assert owner_conforms(Honest(), KEYS, batches).ok

def test_bad(owner_conforms):
    owner_conforms(FreshTensor(), KEYS, batches)
"""


def test_the_fixture_of_the_pytest_plugin(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["graphshare.testing.pytest_plugin"]\n')
    (tmp_path / "test_owner.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rP", "."]
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "OwnerDoesNotConform" in done.stdout
    assert done.stdout.count("owner conformance") == 1
    assert "Honest conforms" in done.stdout


def test_the_kit_needs_neither_pytest_nor_hypothesis():
    code = (
        "import sys, graphshare.testing\n"
        "sys.exit(bool({'pytest', '_pytest', 'hypothesis'} & sys.modules.keys()))"
    )
    env = {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
