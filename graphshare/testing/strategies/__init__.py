"""Hypothesis strategies for what graphshare deals in; needs Hypothesis.

========================  ========================================================================
:func:`descriptors`       keys and shapes, of :class:`graphshare.BatchDescriptor` or a subclass
:func:`key_sets`          keys to capture together
:func:`shapes`            shapes that a key covers
:func:`batches`           query and sequence lengths of a batch that a key covers
:func:`nests`             plans of states: nests of tensors and host values, made as often as wanted
:func:`arrival_traces`    requests that come in over the steps of an engine
========================  ========================================================================

All shrink towards small and plain.

Example:
    >>> from hypothesis import given, settings
    >>> from hypothesis import strategies as st
    >>> from graphshare.testing.strategies import key_sets, shapes
    >>> @settings(max_examples=20, database=None)
    ... @given(st.data())
    ... def test_a_key_covers_its_shapes(data):
    ...     for key in data.draw(key_sets()):
    ...         assert key.covers(data.draw(shapes(key)))
    >>> test_a_key_covers_its_shapes()
"""

from graphshare.testing.strategies.keys import Requests as Requests
from graphshare.testing.strategies.keys import batches as batches
from graphshare.testing.strategies.keys import descriptor_fields as descriptor_fields
from graphshare.testing.strategies.keys import descriptors as descriptors
from graphshare.testing.strategies.keys import key_sets as key_sets
from graphshare.testing.strategies.keys import shapes as shapes
from graphshare.testing.strategies.nests import Branch as Branch
from graphshare.testing.strategies.nests import Place as Place
from graphshare.testing.strategies.nests import Plan as Plan
from graphshare.testing.strategies.nests import Value as Value
from graphshare.testing.strategies.nests import leaf_paths as leaf_paths
from graphshare.testing.strategies.nests import make as make
from graphshare.testing.strategies.nests import nests as nests
from graphshare.testing.strategies.nests import places as places
from graphshare.testing.strategies.nests import spell as spell
from graphshare.testing.strategies.nests import values as values
from graphshare.testing.strategies.traces import Arrival as Arrival
from graphshare.testing.strategies.traces import arrival_traces as arrival_traces

__all__ = [
    "Arrival",
    "Branch",
    "Place",
    "Plan",
    "Requests",
    "Value",
    "arrival_traces",
    "batches",
    "descriptor_fields",
    "descriptors",
    "key_sets",
    "leaf_paths",
    "make",
    "nests",
    "places",
    "shapes",
    "spell",
    "values",
]
