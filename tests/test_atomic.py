"""Objects change atomically: if an exception of a signal handler or of an allocation ends a method at any point, the object is as it was
before the call, or as the whole call would leave it. The call can then be made again."""

import ast
import gc
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

import blitz_attn
from blitz_attn._nsa import store
from cases_atomic import NSA_CASES, Case

PACKAGE = Path(blitz_attn.__file__).parent
CASES = dict(NSA_CASES)

# ---- The paged cache of transformers --------------------------------------------------------------------------------

try:
    import torch
    from transformers import LlamaConfig, MistralConfig

    from blitz_attn.integrations._transformers.cache import IndexedPagedLayer, PagedCache, PagedLayer, PagedPair
except ImportError:
    torch = None

if torch:
    NUMBERS = torch.from_numpy(np.random.default_rng(3).standard_normal((2, 2, 60, 8), dtype=np.float32))
    SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}

    def update(first, end):
        def call(layer):
            with torch.no_grad():
                layer.update(NUMBERS[:, :, first:end], -NUMBERS[:, :, first:end])

        return call

    def selected(layer):
        queries = NUMBERS[: layer.keys.shape[0], :, :1].transpose(1, 2)
        return layer.select_and_attend(queries, [(0, layer.length)] * len(queries), budget=4, dense_below=0)

    def paged_layer(tokens):
        layer = PagedLayer(4)
        if tokens:
            update(0, tokens)(layer)
            selected(layer)
        return layer

    def bits(x):
        return x.contiguous().numpy().tobytes()

    def seen_of_layer(layer):
        if not layer.is_initialized:
            return None
        return (layer.length, bits(layer.keys), bits(layer.values), bits(selected(layer)) if layer.length else None)

    def layer_case(call, tokens=30):
        return Case(lambda: paged_layer(tokens), call, seen_of_layer)

    def update_indexer(first, end):
        return lambda layer: layer.update_indexer(NUMBERS[:, 0, first:end])

    def indexed_layer(tokens=30):
        layer = IndexedPagedLayer(4)
        if tokens:
            update(0, tokens)(layer)
            update_indexer(0, tokens)(layer)
            layer.indexer_position_ids = torch.arange(2 * tokens).reshape(2, tokens)
        return layer

    def seen_of_indexed(layer):
        of_index = [None if x is None else bits(x) for x in (layer.indexer_keys, layer.indexer_position_ids)]
        return layer.is_indexer_initialized, of_index, None if layer.keys is None else (bits(layer.keys), bits(layer.values))

    def indexed_case(call, tokens=30):
        return Case(lambda: indexed_layer(tokens), call, seen_of_indexed)

    def paged_cache(config):
        cache = PagedCache(config, 4)
        for i in range(2):
            with torch.no_grad():
                cache.update(NUMBERS[:, :, :10], NUMBERS[:, :, 10:20], i)
        return cache

    def seen_of_cache(cache):
        return [(layer.get_seq_length(), None if layer.keys is None else (bits(layer.keys), bits(layer.values))) for layer in cache.layers]

    def paged_pair(config):
        pair = PagedPair(config, 4)
        for cache in (pair.self_attention_cache, pair.cross_attention_cache):
            cache.layers = paged_cache(config).layers
        pair.is_updated = {0: True, 1: True}
        return pair

    def seen_of_pair(pair):
        return [seen_of_cache(cache) for cache in (pair.self_attention_cache, pair.cross_attention_cache)], list(pair.is_updated.values())

    def update_of_cache(cache):
        with torch.no_grad():
            cache.update(NUMBERS[:, :, 30:35], NUMBERS[:, :, 20:25], 1)

    FIRST, INDICES = torch.tensor([1, 0]), torch.tensor([1])
    CASES |= {
        "PagedLayer.update, the first": layer_case(update(0, 20), 0),
        "PagedLayer.update, with room": layer_case(update(30, 31)),
        "PagedLayer.update, full": layer_case(update(30, 60)),
        "PagedLayer.lazy_initialization": layer_case(lambda layer: layer.lazy_initialization(NUMBERS, NUMBERS), 0),
        "PagedLayer.crop": layer_case(lambda layer: layer.crop(-7)),
        "PagedLayer.reset": layer_case(lambda layer: layer.reset()),
        "PagedLayer._take": layer_case(lambda layer: layer.batch_repeat_interleave(2)),
        "PagedLayer.select_and_attend": layer_case(selected),
        "IndexedPagedLayer.update_indexer, the first": indexed_case(update_indexer(0, 20), 0),
        "IndexedPagedLayer.update_indexer, full": indexed_case(update_indexer(30, 60)),
        "IndexedPagedLayer.indexer_position_ids": indexed_case(lambda layer: setattr(layer, "indexer_position_ids", NUMBERS)),
        "IndexedPagedLayer.crop": indexed_case(lambda layer: layer.crop(-7)),
        "IndexedPagedLayer.reset": indexed_case(lambda layer: layer.reset()),
        "IndexedPagedLayer._take": indexed_case(lambda layer: layer.batch_repeat_interleave(2)),
    }
    for name, config in (("", LlamaConfig(**SIZES)), (", windows", MistralConfig(**SIZES, sliding_window=6))):
        for method, call in {
            "update": update_of_cache,
            "reset": lambda cache: cache.reset(),
            "crop": lambda cache: cache.crop(-1),
            "reorder_cache": lambda cache: cache.reorder_cache(FIRST),
            "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
            "batch_select_indices": lambda cache: cache.batch_select_indices(INDICES),
        }.items():
            if not (name and method == "crop"):  # transformers refuses to crop a window that is full
                CASES[f"PagedCache.{method}{name}"] = Case(lambda config=config: paged_cache(config), call, seen_of_cache)
            if not name and method != "update":
                CASES[f"PagedPair.{method}"] = Case(lambda config=config: paged_pair(config), call, seen_of_pair)


# ---- The harness --------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    pass


# The files that change the objects of the cases. An exception in a function that these files call arrives at the bytecode of the call.
WATCHED = ("blitz_attn/nsa.py", "_nsa/store.py", "_transformers/cache.py", "_transformers/steps.py", "transformers/cache_utils.py")


def watched(filename):
    return filename.endswith(WATCHED)


def traced(at, call, *arguments):
    """Makes the call. Before each bytecode of the watched files runs, calls `at` with the bytecode's location."""

    def trace(frame, event, argument):
        if not watched(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            at((frame.f_code, frame.f_lasti))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*arguments)
    finally:
        sys.settrace(before)


def stops(call, *arguments):
    """Numbers of the executed bytecodes at which a call is stopped: for each location in the code, the first, second and last time it is reached."""
    places = []
    traced(places.append, call, *arguments)
    chosen = set()
    for order in (range(len(places)), range(len(places) - 1, -1, -1)):
        times = {}
        for n in order:
            times[places[n]] = times.get(places[n], 0) + 1
            if times[places[n]] <= (2 if order.step > 0 else 1):
                chosen.add(n)
    return sorted(chosen)


def stop(number, call, *arguments):
    left = number

    def at(place):
        nonlocal left
        if left == 0:
            raise Stopped
        left -= 1

    with pytest.raises(Stopped):
        traced(at, call, *arguments)


def check_atomic(case):
    """Stops the call at each of its `stops`, and checks the object. Returns the number of stops."""
    whole = case.make()
    before = case.seen(whole)
    numbers = stops(case.call, whole)
    after = case.seen(whole)
    for i, number in enumerate(numbers):
        changed = case.make()
        stop(number, case.call, changed)
        found = case.seen(changed)
        assert found in (before, after), f"stopped at bytecode {number}: neither as before nor as after"
        if found == before and i % 8 == 0:
            case.call(changed)
            assert case.seen(changed) == after, f"stopped at bytecode {number}: the same call again gives something else"
    return len(numbers)


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_is_stopped_anywhere(name):
    assert check_atomic(CASES[name]) >= 3


# ---- Mistakes that the harness must find ----------------------------------------------------------------------------


def counts_first(self, k, v, lens):
    held, new, counts = self._checked(k, v, lens)
    self._held = held._replace(lens=held.lens + counts)  # the mistake: tokens count before there is room
    self._held = self._with_room(self._held, int(self._held.lens.max(initial=0)))
    for x, tokens in zip(self._held.room, new, strict=False):
        store.copy(tokens, x[:, held.lens[0] : self._held.lens[0]])
    self._compress(self._held, slice(None), int(held.lens[0]), int(self._held.lens[0]))


def moves_in_place(self, indices):
    for x in self._held.room:
        x[:] = x[indices]  # the mistake: keys move before values
    self._held = self._held._replace(lens=self._held.lens[list(indices)])


def crops_one_layer_after_the_other(self, tokens_to_remove):
    for layer in self.layers:
        layer.crop(tokens_to_remove)


MISTAKES = {
    "counts first": (store.Store, "append", counts_first, "NsaCache.append, with room"),
    "moves in place": (store.Store, "reorder", moves_in_place, "NsaCache.reorder"),
}
if torch:
    MISTAKES["crops one layer after the other"] = (PagedCache, "crop", crops_one_layer_after_the_other, "PagedCache.crop")


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_are_found(name, monkeypatch):
    owner, method, wrong, case = MISTAKES[name]
    monkeypatch.setattr(owner, method, wrong)
    monkeypatch.setattr(sys.modules[__name__], "watched", lambda filename: filename == __file__)
    with pytest.raises(AssertionError, match="neither as before nor as after"):
        check_atomic(CASES[case])


@pytest.mark.skipif(torch is None, reason="needs torch and transformers")
def test_layers_that_are_replaced_are_freed_at_once():
    cache = paged_cache(LlamaConfig(**SIZES))
    gc.disable()
    try:
        replaced = weakref.ref(cache.layers[0])
        cache.reorder_cache(FIRST)
        assert replaced() is None
    finally:
        gc.enable()


@pytest.mark.skipif(torch is None, reason="needs torch and transformers")
def test_summaries_of_a_cropped_layer_are_those_of_a_layer_that_never_had_more():
    cropped, fresh = paged_layer(30), paged_layer(0)
    cropped.crop(-7)
    update(0, 23)(fresh)
    assert seen_of_layer(cropped) == seen_of_layer(fresh)


# ---- No object is forgotten ---------------------------------------------------------------------------------------

# Classes whose methods change their objects, but which need no case above, and the reasons.
OF_ONE_CALL = "is made by a call and ends with it"
NEED_NO_CASE = {
    "_nsa/call.py Room": OF_ONE_CALL,
    "_reference/backward.py _BiasSums": OF_ONE_CALL,
    "_sabi/function.py _Found": OF_ONE_CALL,
    "_select/profile.py _Capture": OF_ONE_CALL,
    "integrations/_transformers/latents.py Latents": OF_ONE_CALL,
    "integrations/_transformers/pools.py _Pools": OF_ONE_CALL,
    "distributed/_check.py Counting": "counts messages of a check",
    "distributed/_comm.py Transfer": OF_ONE_CALL,
    "distributed/_comm.py Waiter": OF_ONE_CALL,
    "distributed/_exchange.py Stages": OF_ONE_CALL,
    "distributed/_exchange.py Sums": OF_ONE_CALL,
    "distributed/_problem.py Problem": "changes while it is made",
    "distributed/_routes.py Routes": "remembers what it has computed, each by one assignment",
    "distributed/_rows.py RowCall": "changes while it is made",
    "distributed/attention.py _Call": OF_ONE_CALL,
    "distributed/decode.py DecodePlan": "changes while it is made",
    "distributed/decode.py Shards": "changes while it is made",
    "integrations/_diffusers/sparse.py Handle": "changes by one assignment; an undo that was stopped can be called again",
    "integrations/_diffusers/steps.py Job": "changes by one assignment",
    "integrations/_transformers/dsa.py _Selection": OF_ONE_CALL,
    "integrations/_vllm/backend.py Layer": "remembers what it has computed, each by one assignment",
    "integrations/_vllm/step.py Step": "remembers what it has computed, each by one assignment",
    "integrations/_torch/native.py NativeSparseAttention": "saves what the gradient needs, for autograd",
    "distributed/_lazy.py computed_once": "changes while its class is made",
}
CONSTRUCTORS = ("__init__", "__new__")


def changed_by(function):
    """Whether a method assigns to an attribute or element of its first argument."""
    if not function.args.args:
        return False
    name = function.args.args[0].arg
    for node in ast.walk(function):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            root = node
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if isinstance(root, ast.Name) and root.id == name:
                return True
    return False


def test_every_method_that_changes_its_object_has_a_case():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for owner in ast.walk(ast.parse(path.read_text())):
            if isinstance(owner, ast.ClassDef):
                methods = [item for item in owner.body if isinstance(item, ast.FunctionDef) and item.name not in CONSTRUCTORS]
                found |= {(f"{path.relative_to(PACKAGE).as_posix()} {owner.name}", item.name) for item in methods if changed_by(item)}
    changing = {owner for owner, _ in found}
    tested = {name.partition(",")[0] for name in CASES}
    if torch is None:
        found = {(owner, method) for owner, method in found if "integrations/_transformers" not in owner}
    for owner, method in sorted(found):
        if owner not in NEED_NO_CASE and method[0] != "_":  # private methods are stopped within public ones
            name = f"{owner.split()[-1]}.{method}".replace("Store.held", "NsaCache.attend").replace("Store.", "NsaCache.")
            assert name in tested, f"{owner}.{method} changes its object, and no case stops it"
    assert set(NEED_NO_CASE) <= changing


def test_no_value_is_computed_under_a_lock_of_python():
    """A child that is forked while another thread holds a lock would wait for the lock forever: see blitz_attn/distributed/_lazy.py."""
    named = [path.name for path in PACKAGE.rglob("*.py") if "import cached_property" in path.read_text()]
    assert named == []
