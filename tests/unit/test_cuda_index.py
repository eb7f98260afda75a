"""The index of a CUDA graph's words, and its changes, on a driver that is made up."""

from __future__ import annotations

import contextlib
import ctypes
from random import Random
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from graphshare.capture._cuda_concern import Concerns
from graphshare.capture._cuda_graph import _seen
from graphshare.capture._cuda_known import KnownMemory, Pairs
from graphshare.capture._cuda_nodes import GraphIndex
from graphshare.capture._cuda_patch import GraphPatch
from graphshare.capture._graph_driver import Setters
from graphshare.capture._tensor_maps import TensorMaps
from graphshare.capture.reading import Allocation, Certainty, Holder
from graphshare.errors import RebindError
from tests.made_up_driver import (
    BASE,
    MAP,
    MAPS,
    NO_MAPS,
    Code,
    Driver,
    Swaps,
    concerns_of,
    held,
    patch_of,
    read,
    words_of,
)


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize("extra", [False, True])
def test_only_what_is_or_was_memory_is_indexed(extra):
    small, packed, freed = 64, (64 << 32) | 64, 0x7E00_0000_0010
    driver = Driver([[BASE + 8, small, packed, freed], [0x1234_5678_9ABC, BASE]], extra=extra)
    index = read(driver, spans=[(0x7E00_0000_0000, 0x7E00_0000_0020)])
    sites = [list(index.sites(node)) for node in index.nodes]
    assert [[site.value for site in each] for each in sites] == [[BASE + 8, freed], [BASE]]
    assert [(site.parameter, site.offset) for site in sites[0]] == [(1, 0), (1, 24)]
    assert sorted(held(index)) == [freed, BASE, BASE + 8]
    assert freed not in driver.asked


def test_graphs_that_were_captured_together_ask_once():
    driver = Driver([[BASE, 0x1234_5678_9ABC], [BASE, 0x1234_5678_9ABC]])
    known = KnownMemory()
    for _ in range(2):
        index = GraphIndex(driver, None, NO_MAPS, known, Pairs())
        assert sorted(held(index)) == [BASE]
    assert sorted(driver.asked) == [0x1234_5678_9ABC, BASE]
    assert driver.asked_layouts == 1
    GraphIndex(driver, None, NO_MAPS, KnownMemory(), Pairs())
    assert len(driver.asked) == 4


def test_what_is_known_to_be_no_address_is_one_in_a_graph_that_allocates_there():
    """Graphs that were captured together, one of which has memory of its own nodes."""
    number, known = 0x1234_5678_9ABC, KnownMemory()
    for _ in range(2):
        for allocations, want in (((), [BASE]), ([(number - 4, 8)], [number, BASE])):
            driver = Driver([[BASE, number], [number, BASE]], allocations=allocations)
            index = GraphIndex(driver, None, NO_MAPS, known, Pairs())
            assert sorted(held(index)) == want
            sites = [[site.value for site in index.sites(node)] for node in index.nodes]
            right = [BASE, number] if allocations else [BASE]
            assert [sorted(each) for each in sites[:2]] == [sorted(right)] * 2
            assert index.allocations == list(allocations)


def test_what_one_node_has_in_the_place_of_anothers_number_is_found():
    """Of what the nodes of a function have in common, each graph is still looked at."""
    number, known = 0x1234_5678_9ABC, KnownMemory()
    for kernels in (
        [[number, BASE], [BASE, number]],
        [[BASE, number], [number, BASE]],
        [[BASE, BASE], [number, number]],
    ):
        driver = Driver(kernels)
        index = GraphIndex(driver, None, NO_MAPS, known, Pairs())
        want = [[word for word in words if word == BASE] for words in kernels]
        assert [[site.value for site in index.sites(node)] for node in index.nodes] == want
        patch_of(index, {BASE: BASE + 8}).apply()
        assert [words_of(block) for block in driver.run] == [
            [BASE + 8 if word == BASE else word for word in words] for words in kernels
        ]


def test_a_parameter_buffer_that_is_shorter_than_the_parameters_is_read_as_far_as_it_goes():
    class Short(Driver):
        def kernel(self, node):
            params = super().kernel(node)
            pairs = (ctypes.c_uint64 * 5).from_address(params.extra)
            ctypes.c_size_t.from_address(pairs[3]).value = 16
            return params

    index = read(Short([[BASE, BASE + 16], [BASE, BASE + 16]], extra=True))
    assert list(index.words) == [7, BASE, 0, 7, BASE, 0]
    assert held(index) == {BASE: ([1, 4], [0, 1])}


@pytest.mark.parametrize("extra", [False, True])
def test_a_kernel_whose_parameters_the_driver_does_not_give_is_sealed(extra):
    class Silent(Driver):
        def kernel(self, node):
            params = super().kernel(node)
            if node == 1:
                if extra:
                    ctypes.c_uint64.from_address(params.extra).value = 0
                else:
                    params.kernelParams = 0
            return params

    index = read(Silent([[BASE], [BASE], [BASE]], extra=extra))
    assert [node.sealed for node in index.nodes] == [False, True, False]
    assert held(index) == {BASE: ([1, 3], [0, 2])}
    assert "CUDA_SUCCESS" in index.nodes[1].opaque[0]
    padded = [[BASE], [0] * 5 + list(MAP) + [0] * 8]  # the only one of its function
    index = read(Silent(padded, extra=extra), maps=MAPS)
    assert [node.sealed for node in index.nodes] == [False, True]
    assert held(index) == {BASE: ([1], [0])}


def test_the_graphs_own_memory_is_seen_and_does_not_move():
    driver = Driver([[BASE, BASE + 64]])
    index = read(driver, fixed=[(BASE + 64, BASE + 128)])
    assert [site.value for site in index.sites(index.nodes[0])] == [BASE, BASE + 64]
    assert sorted(held(index)) == [BASE]


@pytest.mark.parametrize("extra", [False, True])
def test_words_are_changed_in_both_forms_of_the_graph_and_back(extra):
    driver = Driver([[BASE, 5, BASE + 16, BASE]], extra=extra)
    before = driver.blocks[0]
    index = read(driver)
    patch = patch_of(index, {BASE: BASE + 256, BASE + 16: BASE + 512})
    assert driver.set == 0
    patch.apply()
    assert (patch.nodes, patch.words, patch.pairs) == (1, 3, {0, 1})
    assert driver.run == driver.blocks
    assert words_of(driver.blocks[0]) == [BASE + 256, 5, BASE + 512, BASE + 256]
    assert driver.blocks[0][:8] == before[:8]
    assert sorted(held(index)) == [BASE + 256, BASE + 512]
    found = [site.value for site in index.sites(index.nodes[0])]
    assert found == [BASE + 256, BASE + 512, BASE + 256]
    patch.revert()
    assert driver.blocks[0] == before == driver.run[0]
    assert sorted(held(index)) == [BASE, BASE + 16]
    patch.revert()
    assert driver.set == 4


@pytest.mark.parametrize("at", range(1, 7))
def test_a_graph_in_which_a_node_fails_is_as_it_was_in_both_forms(at):
    driver = Driver([[BASE, BASE + 16], [BASE], [3], [BASE + 16]])
    before = list(driver.blocks)
    index = read(driver)
    patch = patch_of(index, {BASE: BASE + 64, BASE + 16: BASE + 32})
    driver.fail_at = (at,)
    with pytest.raises(RebindError) as caught:
        patch.apply()
    assert caught.value.node == f"{(0, 1, 3)[(at - 1) % 3]}: kernel"
    assert "CUDA_ERROR_PLANTED" in str(caught.value)
    assert driver.blocks == driver.run == before
    assert sorted(held(index)) == [BASE, BASE + 16]
    patch.apply()
    assert words_of(driver.run[0]) == words_of(driver.blocks[0]) == [BASE + 64, BASE + 32]


def test_where_one_node_cannot_be_set_back_the_others_are():
    driver = Driver([[BASE], [BASE], [BASE]])
    before = list(driver.blocks)
    index = read(driver)
    patch = patch_of(index, {BASE: BASE + 64})
    patch.apply()
    driver.fail_at = (6 + 3,)  # the second one, in the executable
    with pytest.raises(RebindError) as caught:
        patch.revert()
    assert caught.value.node == "1: kernel"
    assert driver.blocks == before
    assert [driver.run[0], driver.run[2]] == [before[0], before[2]]


def test_a_permutation_of_values_is_followed():
    driver = Driver([[BASE, BASE + 16], [BASE + 16, BASE + 32]])
    index = read(driver)
    patch_of(index, {BASE: BASE + 16, BASE + 16: BASE}).apply()
    assert [words_of(block) for block in driver.blocks] == [
        [BASE + 16, BASE],
        [BASE, BASE + 32],
    ]
    assert sorted(held(index)) == [BASE, BASE + 16, BASE + 32]
    assert held(index)[BASE] == ([2, 4], [0, 1])
    assert held(index)[BASE + 16] == ([1], [0])


def test_what_becomes_one_address_goes_on_as_one_and_comes_apart_again():
    """The new memory is one that the graph reads already."""
    driver = Driver([[BASE], [BASE + 16]])
    before = list(driver.blocks)
    index = read(driver)
    patch = patch_of(index, {BASE: BASE + 16})
    patch.apply()
    assert held(index) == {BASE + 16: ([1, 3], [0, 1])}
    patch_of(index, {BASE + 16: BASE + 32}).apply()
    assert [words_of(block) for block in driver.run] == [[BASE + 32], [BASE + 32]]
    other = read(driver := Driver([[BASE], [BASE + 16]]))
    patch = patch_of(other, {BASE: BASE + 16})
    patch.apply()
    patch.revert()
    assert driver.run == before
    assert held(other) == {BASE: ([1], [0]), BASE + 16: ([3], [1])}


def test_what_moved_together_once_moves_again_as_it_did():
    """Between two places, and in part: what is kept of a move is that of the same words."""
    driver = Driver([[BASE, BASE + 16], [BASE + 16], [BASE]])
    index = read(driver)
    there = {BASE: BASE + 512, BASE + 16: BASE + 256}  # the order by address is the other one
    back = {new: old for old, new in there.items()}
    before = list(driver.blocks)
    for _ in range(3):
        for moves in (there, back):
            patch = patch_of(index, moves)
            patch.apply()
            assert (patch.nodes, patch.words) == (3, 4)
        assert driver.run == driver.blocks == before
    patch = patch_of(index, {BASE: BASE + 64})
    patch.apply()
    assert (patch.nodes, patch.words) == (2, 2)
    assert driver.run[1] == before[1]
    assert words_of(driver.run[0]) == [BASE + 64, BASE + 16]
    for turn in range(10):
        old, new = (BASE + 16, BASE + 32) if turn % 2 == 0 else (BASE + 32, BASE + 16)
        patch_of(index, {old: new, BASE + 64 + turn: BASE + 65 + turn}).apply()
        assert words_of(driver.run[0]) == [BASE + 65 + turn, new]
        assert words_of(driver.run[2]) == [BASE + 65 + turn]


class Mixed(Driver):
    """Kernels with copies, fills and what frees memory between them."""

    kinds = ("memcpy", "kernel", "memset", "free", "memcpy", "kernel")

    def __init__(self, kernels, addresses, **options):
        super().__init__(kernels, **options)
        self.given = {
            0: SimpleNamespace(srcMemoryType=2, srcDevice=addresses[0], dstMemoryType=4,
                               dstDevice=addresses[1], srcHost=0, dstHost=0),
            2: SimpleNamespace(dst=addresses[2]),
            4: SimpleNamespace(srcMemoryType=1, srcDevice=0, dstMemoryType=3, dstDevice=BASE,
                               srcHost=addresses[3], dstHost=BASE),
        }  # fmt: skip
        self.freed_address = addresses[4]
        self.setters |= {kind: Setters(self._told, self._told) for kind in ("memcpy", "memset")}
        self.told = []

    def nodes(self, graph):
        return range(len(self.kinds))

    def kind(self, node):
        return self.kinds[node]

    def kernel(self, node):
        return super().kernel({1: 0, 5: 1}[node])

    def _in_executable(self, executable, node, params):
        return super()._in_executable(executable, {1: 0, 5: 1}[node], params)

    def _in_graph(self, node, params):
        return super()._in_graph({1: 0, 5: 1}[node], params)

    def memcpy(self, node):
        return self.given[node]

    memset = memcpy

    def freed(self, node):
        return self.freed_address

    def _told(self, *args):
        self.told.append((args[-2], dict(vars(args[-1]))))
        return (Code(0),)


def test_copies_and_fills_are_read_and_changed_between_kernels():
    addresses = [BASE, 0x7E00_0000_0000, BASE + 16, BASE + 32, BASE + 48]
    driver = Mixed([[BASE], [BASE + 16, BASE + 64]], addresses)
    index = read(driver)
    sites = [list(index.sites(node)) for node in index.nodes]
    assert [[(site.value, site.offset) for site in each] for each in sites] == [
        [(BASE, 0), (0x7E00_0000_0000, 1)],
        [(BASE, 0)],
        [(BASE + 16, 1)],
        [(BASE + 48, 1)],
        [(BASE + 32, 0)],
        [(BASE + 16, 0), (BASE + 64, 8)],
    ]
    patch = patch_of(index, {BASE: BASE + 256, BASE + 32: BASE + 512})
    assert (patch.nodes, patch.words) == (3, 3)
    patch.apply()
    assert words_of(driver.run[0]) == [BASE + 256]
    assert driver.given[0].srcDevice == BASE + 256
    assert driver.given[0].dstDevice == 0x7E00_0000_0000
    assert driver.given[4].srcHost == BASE + 512
    assert driver.given[4].dstDevice == driver.given[4].dstHost == BASE
    assert sorted(node for node, _ in driver.told) == [0, 0, 4, 4]  # in both forms
    patch.revert()
    assert driver.given[0].srcDevice == BASE
    patch_of(index, {BASE + 16: BASE + 128}).apply()
    assert driver.given[2].dst == BASE + 128
    assert words_of(driver.run[1]) == [BASE + 128, BASE + 64]
    with pytest.raises(RebindError) as caught:
        patch_of(index, {BASE + 48: BASE})
    assert caught.value.node == "3: free"


def test_nodes_are_told_with_what_their_words_are():
    class Memory:
        asked: ClassVar[list[int]] = []

        def find(self, address):
            self.asked.append(address)
            return None if address == BASE + 64 else Allocation(Holder.TORCH, address, 8)

    addresses = [BASE, BASE + 16, BASE, BASE + 32, BASE + 48]
    layouts = [[(0, 8)], [(0, 8), (8, 16)]]
    driver = Mixed([[BASE], [7, BASE + 64, BASE]], addresses, layouts=layouts)
    nodes = list(_seen(read(driver), Memory()))
    assert [[(word.address, word.where) for word in node.words] for node in nodes] == [
        [(BASE, "src"), (BASE + 16, "dst")],
        [(BASE, "parameter 0")],
        [(BASE, "dst")],
        [(BASE + 48, "dst")],
        [(BASE + 32, "src")],
        [(BASE, "parameter 1 + 8")],
    ]
    assert [{word.certainty for word in node.words} for node in nodes[:2]] == [
        {Certainty.READ},
        {Certainty.INFERRED},
    ]
    same = list(_seen(read(Driver([[BASE], [BASE]])), Memory()))
    assert same[0].words == same[1].words


def test_graphs_that_have_the_same_addresses_move_as_one_and_others_as_themselves():
    """What is worked out for the first of them holds for those of the same addresses alone."""
    known = KnownMemory()
    kernels = [
        [[BASE], [BASE + 16]],
        [[BASE + 16, BASE], [BASE]],
        [[BASE], [BASE + 32]],
        [[BASE + 16], [BASE + 48]],
    ]
    drivers = [Driver(each) for each in kernels]
    indices = [GraphIndex(each, None, NO_MAPS, known, Pairs()) for each in drivers]
    assert indices[0].addresses is indices[1].addresses
    moves = Swaps({BASE: BASE + 256, BASE + 16: BASE + 512})
    asked = []
    moves.moving = lambda each, whole=moves.moving: (asked.append(each), whole(each))[1]
    patches = [
        GraphPatch(concerns_of(each), "exec", moves, torch.device("cpu")) for each in indices
    ]
    assert len(asked) == 3
    for patch in patches:
        patch.apply()
    assert [patch.pairs for patch in patches] == [{0, 1}, {0, 1}, {0}, {1}]
    assert [[words_of(block) for block in each.run] for each in drivers] == [
        [[BASE + 256], [BASE + 512]],
        [[BASE + 512, BASE + 256], [BASE + 256]],
        [[BASE + 256], [BASE + 32]],
        [[BASE + 512], [BASE + 48]],
    ]
    assert indices[0].addresses is indices[1].addresses
    patches[0].revert()  # the others stay where they are
    back = Swaps({BASE + 256: BASE, BASE + 512: BASE + 16})
    for index in indices:
        GraphPatch(concerns_of(index), "exec", back, torch.device("cpu")).apply()
    assert [[words_of(block) for block in each.run] for each in drivers] == kernels


def test_a_graph_that_was_read_in_inference_mode_is_changed_outside_of_it():
    driver = Driver([[BASE]])
    with torch.inference_mode():
        index = read(driver)
        patch_of(index, {BASE: BASE + 8}).apply()
    patch_of(index, {BASE + 8: BASE + 16}).apply()
    with torch.inference_mode():
        patch_of(index, {BASE + 16: BASE + 24}).apply()
    assert words_of(driver.run[0]) == [BASE + 24]


def test_an_interruption_leaves_the_words_as_they_were(monkeypatch):
    """Wherever it comes: words are written as they are to be, not by a difference."""
    driver = Driver([[BASE, BASE + 16]])
    index = read(driver)
    patch = patch_of(index, {BASE: BASE + 64})
    for place in ("_write", "_set_executable", "_set_graph"):
        for late in (False, True):
            whole = getattr(GraphPatch, place)

            def interrupted(self, *args, late=late, whole=whole, **options):
                monkeypatch.undo()
                monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
                monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
                if late:
                    whole(self, *args, **options)
                raise KeyboardInterrupt

            monkeypatch.setattr(GraphPatch, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                patch.apply()
            assert list(index.words) == [7, BASE, BASE + 16]
            assert words_of(driver.run[0]) == words_of(driver.blocks[0]) == [BASE, BASE + 16]
    patch.apply()
    assert words_of(driver.run[0]) == [BASE + 64, BASE + 16]


@pytest.mark.parametrize("form", ["executable", "graph"])
@pytest.mark.parametrize("at", range(3))
def test_an_interruption_after_a_node_was_set_leaves_it_as_it_was(form, at):
    """It comes with the driver's answer: nobody has counted the node yet."""
    driver = Driver([[BASE], [BASE, BASE + 16], [BASE]])
    before, index = list(driver.blocks), read(driver)
    patch = patch_of(index, {BASE: BASE + 64})
    setters = driver.setters["kernel"]
    whole = getattr(setters, form)

    def interrupted(*args):
        whole(*args)
        if args[-2] == at:
            driver.setters["kernel"] = setters
            raise KeyboardInterrupt

    driver.setters["kernel"] = setters._replace(
        **{form: lambda *args: interrupted(*args) or (Code(0),)}
    )
    with pytest.raises(KeyboardInterrupt):
        patch.apply()
    assert driver.run == driver.blocks == before
    assert list(index.words) == [7, BASE, 7, BASE, 7, BASE, BASE + 16]
    patch.apply()
    assert words_of(driver.run[1]) == words_of(driver.blocks[1]) == [BASE + 64, BASE + 16]


@pytest.mark.parametrize("current", [0, 1])
def test_nodes_are_set_with_the_graphs_device_current(monkeypatch, current):
    entered = []

    @contextlib.contextmanager
    def device(given):
        entered.append(given)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    index, on = read(Driver([[BASE]])), torch.device("cuda", 1)
    patch = GraphPatch(concerns_of(index), "exec", Swaps({BASE: BASE + 64}), on)
    patch.apply()
    patch.revert()
    assert entered == ([] if current == 1 else [on, on])


def test_a_node_of_a_kind_that_cannot_be_set_is_refused():
    driver = Driver([[BASE]])
    driver.setters = {}
    with pytest.raises(RebindError) as caught:
        patch_of(read(driver), {BASE: BASE + 64})
    assert caught.value.node == "0: kernel"


def test_parameters_of_our_own_hold_what_the_drivers_held():
    driver = Driver([[BASE, 9]])
    params = driver.kernel(0)
    index = read(driver)
    concerns = Concerns(index)
    own = concerns.settable(0)
    assert list(index.words) == [7, BASE, 9]
    assert concerns.settable(0) is own
    assert driver._content(own.params) == driver._content(params)
    index.words[2] = 10
    assert words_of(driver._content(own.params)) == [BASE, 10]


def in_maps(driver, maps=MAPS):
    """The addresses in tensor maps, node by node."""
    index = read(driver, maps=maps)
    found = [[site.value for site in index.sites(node) if site.in_map] for node in index.nodes]
    assert index.has_maps == any(found)
    return found


def test_tensor_maps_are_told_by_alignment_and_format():
    padding = [0] * 5  # the words of the one parameter begin 8 bytes in: 0x210 + 48 is aligned
    driver = Driver([[*padding, *MAP, *([0] * 8)], [*padding[:4], *MAP, *([0] * 8)]])
    assert in_maps(driver) == [[BASE], []]
    for place, other in ((1, 0x80), (1, 0x80000_00800), (4, 0), (3, 1 << 40)):
        words = list(MAP)
        words[place] = other
        assert in_maps(Driver([[*padding, *words, *([0] * 8)]])) == [[]], place
    pointers = [BASE + 512 * i for i in range(8)]
    assert in_maps(Driver([[*padding, *pointers, *([0] * 8)]])) == [[]]


def test_bits_at_the_top_of_a_word_tell_too():
    """They are a sign where words are looked at many at a time."""
    padding = [0] * 5
    for place in (1, 3):
        words = list(MAP)
        words[place] |= 1 << 63
        unused = list(MAPS.unused)
        unused[place] |= 1 << 63
        maps = TensorMaps(True, 0, tuple(unused), MAPS.always, MAPS.bank)
        assert in_maps(Driver([[*padding, *words, *([0] * 8)]]), maps) == [[]]
    words = list(MAP)
    words[2] |= 1 << 63
    assert in_maps(Driver([[*padding, *words, *([0] * 8)]])) == [[BASE]]


def test_what_may_be_a_map_of_an_unknown_encoding_seals_its_node():
    unknown = TensorMaps(True, None, MAPS.unused, MAPS.always, MAPS.bank)
    driver = Driver([[BASE], [0] * 5 + list(MAP) + [0] * 8, [BASE]])
    index = read(driver, maps=unknown)
    assert [node.sealed for node in index.nodes] == [False, True, False]
    assert index.sealed == [index.nodes[1]]
    assert index.nodes[1].opaque == ("what may be a tensor map at byte 48",)
    assert unknown.note != MAPS.note


def test_random_words_are_found_as_one_by_one():
    """The search over all words at once, against one word after the other."""
    random = Random(0)
    for _ in range(50):
        kernels = [
            [
                random.choice((BASE, BASE + (1 << 20) - 1, BASE + (1 << 20), BASE - 1, 5, 1 << 63))
                + random.randrange(2)
                for _ in range(random.randrange(1, 9))
            ]
            for _ in range(random.randrange(1, 6))
        ]
        spans = [(BASE - 8, BASE), (BASE + (1 << 20), BASE + (1 << 20) + 1)]
        fixed = [(BASE + 1, BASE + 2)]
        index = read(driver := Driver(kernels), spans=spans, fixed=fixed)
        want = [
            [word for word in words if BASE - 8 <= word < BASE + (1 << 20) + 1] for words in kernels
        ]
        assert [[site.value for site in index.sites(node)] for node in index.nodes] == want
        moving = {word for words in want for word in words} - {BASE + 1}
        assert sorted(held(index)) == sorted(moving)
        for value, (places, nodes) in held(index).items():
            assert [index.words[place] for place in places] == [value] * len(places)
            assert nodes == [i for i, words in enumerate(driver.blocks) if value in words_of(words)]


@pytest.mark.parametrize("given", ["in one", "as seen", "apart"])
def test_parameters_of_any_size_and_place_are_read_and_changed(given):
    """Against a model that looks at each parameter by itself: the first may begin anywhere, a size
    need be no multiple of eight, or be nothing, and the numbers need not follow the places."""
    random = Random(1)
    for _ in range(200):
        layouts = []
        for _ in range(random.randrange(1, 5)):
            place, layout = 4 * random.choice((0, 0, 1, 2, 14, 27)), []
            for _ in range(random.randrange(0, 5)):
                size = random.choice((0, 1, 2, 4, 8, 12, 16, 20, 64, 112, 116))
                align = random.choice((4, 8, 16, 64)) if size >= 8 else 4
                place = -(-place // align) * align
                layout.append((place, size))
                place += size
            random.shuffle(layout)
            layouts.append(layout)
        kernels = [
            [random.choice((BASE, BASE + 16, 3)) for _ in range(64)] for _ in range(len(layouts))
        ]
        driver = Driver(kernels, layouts=layouts, extra=given == "in one", apart=given == "apart")
        before = list(driver.blocks)
        index = read(driver)
        want = [
            sorted(
                (number, word - start, words[word // 8])
                for number, (start, size) in enumerate(layout)
                if start % 8 == 0
                for word in range(start, start + size - 7, 8)
                if words[word // 8] != 3
            )
            for words, layout in zip(kernels, layouts, strict=True)
        ]
        found = [
            sorted((site.parameter, site.offset, site.value) for site in index.sites(node))
            for node in index.nodes
        ]
        assert found == want
        moved = {BASE: BASE + 512}
        patch_of(index, moved).apply()
        for block, old, layout in zip(driver.run, before, layouts, strict=True):
            other = bytearray(old)
            for start, size in layout:
                for word in range(start, start + size - 7, 8):
                    value = int.from_bytes(old[word : word + 8], "little")
                    if start % 8 == 0 and value in moved:
                        other[word : word + 8] = moved[value].to_bytes(8, "little")
            assert block == other
        assert driver.blocks == driver.run


def test_a_graph_without_parameters_is_read():
    assert held(read(Driver([]))) == {}
    assert held(read(Driver([[]], layouts=[[]]))) == {}
