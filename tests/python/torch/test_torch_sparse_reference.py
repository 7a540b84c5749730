"""The sparse methods and qsgd against their NumPy reference, bit for bit: results, states and what a request ends
with, over 200 steps of gradients of every kind, on 2, 3 and 4 ranks."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest

from sparse_reference import Ranks, Settings, qsgd, uniform
from util import check_names, hvd, launched_once

try:
    import torch

    from dad._lib import _core
    from dad.torch._load import _torch as ops
except ImportError:
    torch = None

NUM_RANKS = 4
STEPS = 200
STREAM = 70  # of no optimizer
WANTS_PLAN, NOT_FINITE, TOO_LARGE = 1, 2, 4

results = launched_once(__file__, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_four_ranks(results, check):
    results.assert_passed(check)


METHODS = [
    Settings("vgc"),
    Settings("vgc", alpha=2.0, coding="word"),
    Settings("vgc", alpha=1.5, zeta=0.9, feedback=True),
    Settings("vgc", coding="word", feedback=True),
    Settings("vgc_strom", tau=1.0),
    Settings("vgc_strom", tau=0.5, alpha=1.5, coding="word"),
    Settings("vgc_strom", tau_absolute=0.25),
    Settings("vgc_strom", tau_absolute=0.1, coding="word"),
    Settings("strom"),
    Settings("strom", tau=1.0, coding="word"),
    Settings("strom", tau_absolute=0.25),
    Settings("strom", tau_absolute=0.1, coding="word"),
    Settings("topk", ratio=0.05, feedback=True),
    Settings("topk", ratio=0.1, feedback=False),
    Settings("topk", ratio=1e-9, feedback=True),
]
QSGD_BITS = (1, 2, 4, 8)


# Gradients


def gradient(random: np.random.Generator, count: int, dtype: type, step: int) -> np.ndarray:
    """Of a kind that the step draws."""
    info = np.finfo(dtype)
    normal = random.standard_normal(count)
    kinds = [
        lambda: normal * 10.0 ** random.uniform(-3, 3),
        lambda: normal + 0.5,  # of one sign, mostly
        lambda: np.sign(normal) * 2.0 ** random.integers(-20, 20, count),
        lambda: random.choice([-1.0, -0.5, 0.0, 0.5, 1.0], count),  # ties
        lambda: np.zeros(count),
        lambda: normal * float(info.smallest_subnormal) * 20,
        lambda: normal * 10.0 ** random.integers(-30, 3, count),
    ]
    if step >= STEPS - 10:
        kinds.append(lambda: np.where(random.random(count) < 0.01, normal * float(info.max) / 4, normal))
        kinds.append(lambda: np.clip(normal, -1, 1) * 1e38)
    with np.errstate(all="ignore"):
        return kinds[random.integers(len(kinds))]().astype(dtype)


@functools.lru_cache(maxsize=64)
def increments(step: int, rank: int, counts: tuple[int, ...], dtype: type):
    """A rank's of r and v in this step; v's is None where it is r's, squared. All methods get the same."""
    random = np.random.default_rng([step, rank, *counts, np.dtype(dtype).itemsize])
    pairs = []
    for count in counts:
        g = gradient(random, count, dtype, step)
        with np.errstate(all="ignore"):
            s = (g * g * random.uniform(0.1, 4, count).astype(dtype)).astype(dtype)
        pairs.append([g, s if step % 3 else None])
    if step in (50, 120) and rank != 0 and counts[0]:
        pairs[0][0][rank % counts[0]] = np.nan if step == 50 else np.inf
    return pairs


def with_squares(pairs):
    with np.errstate(all="ignore"):
        return [(g, g * g if s is None else s) for g, s in pairs]


# Requests


@dataclass
class Request:
    """One layer by one method, in a process set, beside the reference of all of its ranks."""

    settings: Settings
    out: int
    columns: int
    bias: bool
    dtype: type
    place: object
    average: bool

    def __post_init__(self):
        layer = f"{self.out}x{self.columns}" + (":bias" if self.bias else "")
        self.text = self.settings.text(layer)
        self.counts = (self.out * self.columns, *([self.out] if self.bias else []))
        self.name = f"{self.place.size()} {np.dtype(self.dtype).name} {self.text}"
        self.reference = Ranks(self.settings, self.counts, self.dtype, self.place.size())

    def submit(self, pairs):
        dtype = torch.float64 if self.dtype is np.float64 else torch.float32
        self.outputs = [torch.full((count,), 7.0, dtype=dtype) for count in self.counts]
        tensors = [[x if x is None else torch.from_numpy(x) for x in pair] for pair in pairs]
        (dense, square), (dense_bias, bias_square) = (*tensors, [None, None])[:2]
        output, output_bias = (*self.outputs, None)[:2]
        layer = ops.Layer()
        layer.dense, layer.dense_square = dense, square
        layer.dense_bias, layer.dense_bias_square = dense_bias, bias_square
        layer.output, layer.output_bias = output, output_bias
        request = ops.LayersRequest([layer], self.outputs[0])
        fill_in(request, self.name, self.text, self.average, self.place)
        return ops.submit_layers(request)

    def assert_result(self, value, expected, where):
        for output, reference in zip(self.outputs, expected.outputs, strict=True):
            assert_same_bits(output.numpy(), reference, f"{where}: {self.name}")
        assert bool(value & TOO_LARGE) == expected.too_large, where
        assert bool(value & WANTS_PLAN) == expected.too_large, where
        assert bool(value & NOT_FINITE) == (expected.not_finite >= 0), where
        assert value >> 8 == expected.not_finite + 1, where

    def assert_state(self, where):
        mine = self.reference.tensors[self.place.rank()]
        state = exported(self.place, self.name)
        kept = {"residual": np.concatenate([tensor.r for tensor in mine])}
        if self.settings.has_variance:
            kept["variance"] = np.concatenate([tensor.v for tensor in mine])
        if self.settings.rule == "topk" and not self.settings.feedback:
            kept = {}
        kept = {name: values for name, values in kept.items() if len(values)}
        if self.settings.has_threshold and self.settings.tau_absolute is None:
            kept["tau"] = np.array([*(tensor.rms for tensor in mine), 0.0][:2])
        assert set(state) == set(kept), f"{where}: {self.name}: {set(state)}"
        for name, values in kept.items():
            assert_same_bits(state[name], values, f"{where}: {name} of {self.name}")


def fill_in(request, name, method, average, place):
    request.name, request.method = name, method
    request.op = hvd().Average if average else hvd().Sum
    request.process_set, request.stream = place.process_set_id, STREAM


def exported(place, name):
    saved = _core.export_state(place.process_set_id, STREAM, name)
    return {one.name: np.frombuffer(data, one.dtype) for one in saved if (data := one.data)}


def assert_same_bits(mine, reference, where):
    assert mine.dtype == reference.dtype and mine.shape == reference.shape, where
    if np.isnan(reference).any():
        assert np.isnan(mine).all(), where
        return
    bits = np.uint64 if mine.itemsize == 8 else np.uint32
    wrong = np.flatnonzero(mine.view(bits) != reference.view(bits))
    assert not len(wrong), f"{where}: [{wrong[:5]}] {mine[wrong[:5]]} instead of {reference[wrong[:5]]}"


def places():
    some = [hvd().add_process_set(ranks) for ranks in ([1, 3], [0, 1, 2])]
    return [*some, hvd().global_process_set]


def run(requests, steps, joined=()):
    """Steps of all requests of one place, together."""
    place = requests[0].place
    rank, size = place.rank(), place.size()
    for step in range(steps):
        given = []
        for request in requests:
            all_ranks = [increments(step, r, request.counts, request.dtype) for r in range(size)]
            handle = None if rank in joined else request.submit(all_ranks[rank])
            given.append((handle, all_ranks))
        for request, (handle, all_ranks) in zip(requests, given, strict=True):
            shares = [None if r in joined else with_squares(pairs) for r, pairs in enumerate(all_ranks)]
            expected = request.reference.step(shares, request.average)
            if handle is None:
                continue
            value = ops.wait(handle).value
            request.assert_result(value, expected, f"step {step}")
            if step % 25 == 24 or step == steps - 1 or expected.not_finite >= 0:
                request.assert_state(f"step {step}")


def check_every_method_has_the_bits_of_the_reference():
    """On 2, 3 and 4 ranks, in float32 and float64, sums and averages, with a bias."""
    for place in places():
        if place.included():
            requests = []
            for number, settings in enumerate(METHODS):
                average = (number + place.size()) % 2 == 0
                requests.append(Request(settings, 33, 29, True, np.float32, place, average))
                if average:
                    requests.append(
                        Request(settings, 11, 7, number % 4 < 2, np.float64, place, number % 3 > 0)
                    )
            run(requests, STEPS)
            fractions = [_core.stats()["tensors"][request.name]["effective"] for request in requests]
            assert all(0 <= fraction <= 1 for fraction in fractions), fractions
            assert any(fractions), fractions
            _core.drop_states(place.process_set_id, STREAM)
        if place is not hvd().global_process_set:
            hvd().remove_process_set(place)


def check_tensors_of_odd_sizes_and_none():
    place = hvd().global_process_set
    requests = [
        Request(METHODS[number], out, columns, bias, dtype, place, True)
        for number in (0, 3, 4, 9, 12, 14)
        for out, columns, bias, dtype in (
            (0, 5, True, np.float32),
            (5, 0, True, np.float32),
            (1, 1, False, np.float64),
            (1, 1, True, np.float32),
            (1, 517, False, np.float32),
            (7, 1, False, np.float32),
        )
    ]
    run(requests, 60)
    _core.drop_states(0, STREAM)


def check_tensors_of_several_tasks():
    """Beyond 2^16 elements work is cut into tasks, and RMS into sums; beyond 2^20 threads share it."""
    place = hvd().global_process_set
    requests = [Request(METHODS[n], 257, 300, True, np.float32, place, True) for n in (0, 2, 5, 8, 12)]
    run(requests, 4)
    run([Request(METHODS[0], 1025, 1031, True, np.float32, place, True)], 2)
    _core.drop_states(0, STREAM)


def check_a_rank_that_has_joined_counts_and_contributes_nothing():
    place = hvd().global_process_set
    requests = [Request(METHODS[number], 13, 9, True, np.float32, place, True) for number in (0, 2, 5, 8, 12)]
    run(requests, 10)
    for request in requests:
        request.name += " after"
        request.reference = Ranks(request.settings, request.counts, request.dtype, 4)
    if hvd().rank() == 2:
        before = {r.name: exported(place, r.name.removesuffix(" after")) for r in requests}
        hvd().join()
        for request in requests:
            after = exported(place, request.name.removesuffix(" after"))
            assert all((after[key] == values).all() for key, values in before[request.name].items())
    else:
        run(requests, 30, joined=(2,))
        hvd().join()
    _core.drop_states(0, STREAM)


# qsgd


def check_qsgd_has_the_bits_of_the_reference():
    for place in places():
        if place.included():
            run_qsgd(place)
            _core.drop_states(place.process_set_id, STREAM)
        if place is not hvd().global_process_set:
            hvd().remove_process_set(place)


def run_qsgd(place):
    size, seed = place.size(), 11
    cases = [
        (bits, dtype, count) for bits in QSGD_BITS for dtype, count in ((np.float32, 1337), (np.float64, 77))
    ]
    cases += [(4, np.float32, 0), (2, np.float32, 512)]
    good_steps = [0] * len(cases)
    for step in range(STEPS):
        work = []
        for number, (bits, dtype, count) in enumerate(cases):
            name = f"qsgd {size} {number}"
            grads = [increments(step, r, (count,), dtype)[0][0] for r in range(size)]
            tensor = torch.from_numpy(grads[place.rank()].copy())
            request = ops.Collective(ops.KINDS["allreduce"], [tensor])
            request.grouped = request.in_place = True
            fill_in(request, name, f"qsgd;bits={bits};seed={seed}", number % 2 == 0, place)
            handle = ops.submit(request)
            work.append((handle, name, tensor, grads))
        for number, (handle, name, tensor, grads) in enumerate(work):
            bits, dtype, count = cases[number]
            value = ops.wait(handle).value
            with np.errstate(all="ignore"):
                too_huge = [not (np.abs(g) <= np.finfo(np.float32).max).all() for g in grads]
                assert bool(value & NOT_FINITE) == any(too_huge), (name, step)
                if any(too_huge):
                    assert value >> 8 == too_huge.index(True) + 1
                    assert tensor.isnan().all()
                    continue
                total = np.zeros(count, dtype)
                for rank, g in enumerate(grads):
                    total += qsgd(g, bits, uniform(seed, name, good_steps[number], rank, count))
                total = total if number % 2 else total / dtype(size)
            assert_same_bits(tensor.numpy(), total, f"{name} step {step} bits {bits}")
            good_steps[number] += 1
    for number, steps in enumerate(good_steps):
        assert exported(place, f"qsgd {size} {number}")["step"][0] == steps


def check_qsgd_is_right_on_average():
    if hvd().rank() != 0:  # one is enough: it is about the reference
        return
    random = np.random.default_rng(0)
    x = random.standard_normal(600)
    for bits in QSGD_BITS:
        total = np.zeros(600)
        for step in range(4000):
            total += qsgd(x, bits, uniform(3, "x", step, 0, 600))
        # A level is s / L wide, and rounding has at most half of that as its deviation.
        width = np.abs(x).max() / max(1, 2 ** (bits - 1) - 1)
        assert np.abs(total / 4000 - x).max() < 5 * width / np.sqrt(4000), bits
