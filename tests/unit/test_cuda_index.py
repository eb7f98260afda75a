"""The index of a CUDA graph's words, and its changes, on a driver that is made up."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from graphshare.capture._cuda_nodes import GraphIndex, KernelParams
from graphshare.capture._cuda_patch import NodeChange
from graphshare.capture._graph_driver import DriverError
from graphshare.capture._tensor_maps import TensorMaps
from graphshare.errors import RebindError

BASE = 0x7F00_0000_0000
NO_MAPS = TensorMaps(False, None)
# As a driver for the H200 encodes them: the address, the format and a stride, sizes, a box.
MAPS = TensorMaps(
    True,
    0,
    (0, 0xFFF8980D, 0, 0xFFFFFFFF00000000, 0, 0, 0, 0xFFFFFFFF00000000),
    (1, 4, 6),
    0x210,
)
MAP = (BASE, 0x8000046522, 1 << 60, 0, 0x3FF000003FF, 0, 0x3F00000000000000, 0x1F)


class Driver:
    """A graph of kernels, each with one parameter of some words after an integer of 4 bytes."""

    def __init__(self, kernels, *, extra=False):
        self.blocks = [self._block(words) for words in kernels]
        self.extra = extra
        self.asked = []
        self.set = []
        self.fail_at = None
        self._alive = []

    @staticmethod
    def _block(words):
        return bytearray(b"".join(word.to_bytes(8, "little") for word in (7, *words)))

    def nodes(self, graph):
        return range(len(self.blocks))

    def kind(self, node):
        return "kernel"

    def function(self, params):
        return len(self.blocks[params.node])

    def name(self, params):
        return "kernel"

    def layout(self, params):
        return [(0, 4), (8, len(self.blocks[params.node]) - 8)]

    def kernel(self, node):
        content = bytes(self.blocks[node])
        data = ctypes.create_string_buffer(content, len(content))
        start = ctypes.addressof(data)
        if self.extra:
            size = ctypes.c_size_t(len(content))
            pairs = (ctypes.c_uint64 * 5)(1, start, 2, ctypes.addressof(size), 0)
            self._alive += [data, size, pairs]
            return SimpleNamespace(node=node, extra=ctypes.addressof(pairs), kernelParams=0)
        pointers = (ctypes.c_void_p * 2)(start, start + 8)
        self._alive += [data, pointers]
        return SimpleNamespace(node=node, extra=0, kernelParams=ctypes.addressof(pointers))

    def allocated(self, address):
        self.asked.append(address)
        return ("device", BASE, 1 << 20) if BASE <= address < BASE + (1 << 20) else None

    def _content(self, params):
        if params.extra:
            pairs = (ctypes.c_uint64 * 5).from_address(params.extra)
            return ctypes.string_at(pairs[1], ctypes.c_size_t.from_address(pairs[3]).value)
        pointers = (ctypes.c_void_p * 2).from_address(params.kernelParams)
        size = len(self.blocks[params.node])
        return (
            ctypes.string_at(pointers[0], 4) + b"\0" * 4 + ctypes.string_at(pointers[1], size - 8)
        )

    def set_kernel(self, executable, node, params):
        self.set.append((executable, node))
        if len(self.set) == self.fail_at:
            raise DriverError("set", "PLANTED")
        self.run = {**getattr(self, "run", {}), node: self._content(params)}

    def set_kernel_in_graph(self, node, params):
        self.set.append(("graph", node))
        if len(self.set) == self.fail_at:
            raise DriverError("set", "PLANTED")
        self.blocks[node] = bytearray(self._content(params))


def words_of(block):
    return [int.from_bytes(block[i : i + 8], "little") for i in range(8, len(block), 8)]


@pytest.mark.parametrize("extra", [False, True])
def test_only_what_is_or_was_memory_is_indexed(extra):
    small, packed, freed = 64, (64 << 32) | 64, 0x7E00_0000_0010
    driver = Driver([[BASE + 8, small, packed, freed], [0x1234_5678_9ABC, BASE]], extra=extra)
    index = GraphIndex(driver, None, NO_MAPS, [(0x7E00_0000_0000, 0x7E00_0000_0020)])
    assert [[site.value for site in node.sites] for node in index.nodes] == [
        [BASE + 8, freed],
        [BASE],
    ]
    assert [site.offset for site in index.nodes[0].sites] == [0, 24]
    assert index.ascending == [freed, BASE, BASE + 8]
    assert freed not in driver.asked


@pytest.mark.parametrize("extra", [False, True])
def test_words_are_changed_in_both_forms_of_the_graph_and_back(extra):
    driver = Driver([[BASE, 5, BASE + 16, BASE]], extra=extra)
    before = bytes(driver.blocks[0])
    index = GraphIndex(driver, None, NO_MAPS, [])
    (node,) = index.nodes
    new = {BASE: BASE + 256, BASE + 16: BASE + 512}
    change = NodeChange(
        driver, "exec", index, node, [(site, new[site.value]) for site in node.sites]
    )
    change.apply()
    index.changed([*new, *new.values()])
    assert words_of(driver.run[0]) == words_of(driver.blocks[0])
    assert words_of(driver.blocks[0]) == [BASE + 256, 5, BASE + 512, BASE + 256]
    assert index.ascending == [BASE + 256, BASE + 512]
    assert len(index.holding(BASE + 256)) == 2
    change.revert()
    index.changed([*new, *new.values()])
    assert bytes(driver.blocks[0]) == before == driver.run[0]
    assert index.ascending == [BASE, BASE + 16]


@pytest.mark.parametrize("at", [1, 2])
def test_a_node_that_fails_is_as_it_was_in_both_forms(at):
    driver = Driver([[BASE, BASE + 16]])
    before = bytes(driver.blocks[0])
    index = GraphIndex(driver, None, NO_MAPS, [])
    (node,) = index.nodes
    change = NodeChange(driver, "exec", index, node, [(node.sites[0], BASE + 64)])
    driver.fail_at = at
    with pytest.raises(RebindError) as caught:
        change.apply()
    assert caught.value.node == "0: kernel"
    assert bytes(driver.blocks[0]) == before
    assert getattr(driver, "run", {0: before})[0] == before
    assert node.sites[0].value == BASE


def test_a_permutation_of_values_is_followed():
    driver = Driver([[BASE, BASE + 16], [BASE + 16, BASE + 32]])
    index = GraphIndex(driver, None, NO_MAPS, [])
    swap = {BASE: BASE + 16, BASE + 16: BASE}
    for node in index.nodes:
        sites = [(site, swap[site.value]) for site in node.sites if site.value in swap]
        NodeChange(driver, "exec", index, node, sites).apply()
    index.changed([*swap])
    assert [words_of(block) for block in driver.blocks] == [
        [BASE + 16, BASE],
        [BASE, BASE + 32],
    ]
    assert index.ascending == [BASE, BASE + 16, BASE + 32]
    assert {node.number for node, _ in index.holding(BASE)} == {0, 1}
    assert {node.number for node, _ in index.holding(BASE + 16)} == {0}


def test_parameters_of_our_own_hold_what_the_drivers_held():
    driver = Driver([[BASE, 9]])
    params = driver.kernel(0)
    index = GraphIndex(driver, None, NO_MAPS, [])
    own = index.own_params(index.nodes[0])
    assert isinstance(own, KernelParams)
    assert list(own.words) == [7, BASE, 9]
    assert index.own_params(index.nodes[0]) is own
    assert driver._content(own.params) == driver._content(params)


def test_tensor_maps_are_told_by_alignment_and_format():
    padding = [0] * 5  # the words of the one parameter begin 8 bytes in: 0x210 + 48 is aligned
    driver = Driver([[*padding, *MAP, *([0] * 8)], [*padding[:4], *MAP, *([0] * 8)]])
    aligned, crooked = GraphIndex(driver, None, MAPS, []).nodes
    assert [(site.value, site.in_map) for site in aligned.sites if site.value == BASE] == [
        (BASE, True)
    ]
    assert not any(site.in_map for site in crooked.sites)
    for place, other in ((1, 0x80), (1, 0x80000_00800), (4, 0), (3, 1 << 40)):
        words = list(MAP)
        words[place] = other
        driver = Driver([[*padding, *words, *([0] * 8)]])
        (node,) = GraphIndex(driver, None, MAPS, []).nodes
        assert not any(site.in_map for site in node.sites), place
    pointers = [BASE + 512 * i for i in range(8)]
    driver = Driver([[*padding, *pointers, *([0] * 8)]])
    assert not any(s.in_map for s in GraphIndex(driver, None, MAPS, []).nodes[0].sites)


def test_what_may_be_a_map_of_an_unknown_encoding_seals_its_node():
    unknown = TensorMaps(True, None, MAPS.unused, MAPS.always, MAPS.bank)
    driver = Driver([[0] * 5 + list(MAP) + [0] * 8, [BASE]])
    mapped, plain = GraphIndex(driver, None, unknown, []).nodes
    assert mapped.sealed
    assert mapped.opaque
    assert not plain.sealed
    assert unknown.note != MAPS.note
