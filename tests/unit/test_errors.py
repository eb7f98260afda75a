"""Errors carry their facts, in a message of one form and as attributes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import graphshare
from graphshare import BatchDescriptor, GraphShareError, KeyMismatchError, Staleness, errors

KEY = BatchDescriptor(8, 4)
CLASSES = [getattr(errors, name) for name in errors.__all__]

FACTS = {
    "KeyMismatchError": {"missing": (KEY,), "nearest": (BatchDescriptor(4, 4),)},
    "StaleStateError": {"rule": Staleness.USED_UP, "written_by": ("draft", KEY)},
    "AddressChangedError": {"path": "a.b", "field": "stride", "keys": (KEY,)},
    "BakedValueChangedError": {"path": "a.b", "rule": "at_most"},
    "LazyStateError": {"path": "a.b"},
    "SpecMismatchError": {"fields": ("page_size",)},
    "StateDifferenceError": {"path": "a.b", "paths": ("a.b", "a.c")},
}


def made(cls):
    return cls(
        "target: replay",
        expected="a fresh state",
        got="a stale one",
        key=KEY,
        consequence="Wrong tokens",
        remedy="Refresh first",
        **FACTS.get(cls.__name__, {}),
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_a_graphshare_error(cls):
    """One ``except`` catches all that graphshare refuses, and each is exported."""
    assert issubclass(cls, GraphShareError)
    assert getattr(graphshare, cls.__name__) is cls
    assert inspect.getdoc(cls)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_message_has_its_form(cls):
    """What, expected, got, key, consequence, remedy, in that order, whatever the class."""
    text = "target: replay: expected a fresh state, got a stale one (key {}). {}. {}."
    assert str(made(cls)) == text.format(KEY, "Wrong tokens", "Refresh first")


def test_the_message_leaves_out_what_is_not_there():
    """No empty parts, no ``None``, and no doubled full stop."""
    assert str(GraphShareError("pool: no")) == "pool: no."
    assert str(GraphShareError("pool: no", key=KEY)) == f"pool: no (key {KEY})."
    assert str(GraphShareError("pool: no", remedy="Try again.")) == "pool: no. Try again."
    assert str(GraphShareError("pool: no", remedy="Did it return?")) == "pool: no. Did it return?"
    assert str(GraphShareError("n", expected=0, got=1)) == "n: expected 0, got 1."


@pytest.mark.parametrize("cls", CLASSES)
def test_attributes_carry_the_facts(cls):
    """Each fact is an attribute; those that were not given have a default of their type."""
    error = made(cls)
    assert (error.what, error.expected, error.got) == (
        "target: replay",
        "a fresh state",
        "a stale one",
    )
    assert (error.key, error.consequence, error.remedy) == (KEY, "Wrong tokens", "Refresh first")
    bare = cls("pool")
    for name, value in FACTS.get(cls.__name__, {}).items():
        assert getattr(error, name) == value
        default = getattr(bare, name)
        assert default is None or isinstance(value, type(default))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("copied", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_pickles_whole(cls, copied):
    """An error crosses processes with its type, message and facts."""
    error = made(cls)
    error.add_note("seen by rank 1") if hasattr(error, "add_note") else None
    again = copied(error)
    assert type(again) is cls
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


def test_an_address_is_shown_in_hex_and_stays_a_number():
    """As ``prove`` and ``rebind`` show them; a shape or a device is shown as it is."""
    error = errors.AddressChangedError("p", expected=0x5500, got=0x6600, field="address")
    assert str(error) == "p: expected 0x5500, got 0x6600."
    assert (error.expected, error.got) == (0x5500, 0x6600)
    assert str(errors.AddressChangedError("p", expected=(4,), got=(2,), field="shape")) == (
        "p: expected (4,), got (2,)."
    )
    error = errors.AddressChangedError("p", expected=2, got=4, field="stride")
    assert str(error) == "p: expected 2, got 4."


def test_an_unknown_fact_is_a_mistake():
    """A misspelt attribute is refused rather than carried along in silence."""
    with pytest.raises(TypeError):
        GraphShareError("pool", path="a.b")
    with pytest.raises(TypeError):
        errors.StaleStateError("pool", rules="equal")


def test_key_mismatch_is_a_key_error():
    """``except KeyError`` catches it, and its text is a sentence and not a repr."""
    error = made(KeyMismatchError)
    with pytest.raises(KeyError) as caught:
        raise error
    assert caught.value is error
    assert str(error).startswith("target: replay: expected")


def test_staleness_reads_as_text():
    """A rule compares and prints as its text, so that logs and JSON need no special case."""
    assert Staleness.USED_UP == "used up"
    assert f"{Staleness.USED_UP.value}" == "used up"
    assert len({each.value for each in Staleness}) == len(Staleness)
