"""What the tests of capture share: segments added up, and a comparison with torch alone."""

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from dad.torch import capture  # noqa: E402
from dad.torch._load import _torch as ops  # noqa: E402

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def tracker():
    """Body of a fixture: tracks parameters for one test."""
    torch.manual_seed(0)
    tracked = []

    def start(params, mode="rows"):
        params = list(params.parameters() if isinstance(params, nn.Module) else params)
        tracked.extend(params)
        return [capture.track(param, mode) for param in params]

    yield start
    for param in tracked:
        capture.untrack(param)


def take(params):
    """What the segments of each parameter add up to, in float64; and the segments."""
    params = list(params)
    sums = {param: torch.zeros(param.shape, dtype=torch.float64) for param in params}
    segments = {param: ops.capture_take(param) for param in params}
    for param in params:
        for segment in segments[param]:
            if segment.kind == "indexed":
                assert segment.index.dtype == torch.int64
                sums[param].view(len(param), -1).index_add_(0, segment.index, segment.x.double())
                continue
            assert segment.a.is_contiguous() and segment.d.is_contiguous()
            assert not segment.a.requires_grad and not segment.d.requires_grad
            assert segment.a.shape[0] == segment.d.shape[0]
            rows = slice(segment.out_begin, segment.out_begin + segment.d.shape[1])
            sums[param].view(len(param), -1)[rows] += segment.d.double().T @ segment.a.double()
            if segment.has_bias:
                bias = ops.capture_folded_bias(param)
                sums[bias][rows] += segment.d.double().sum(0)
    return sums, segments


def totals(params):
    """The same with what is in .grad."""
    params = list(params)
    sums, segments = take(params)
    for param in params:
        if param.grad is not None:
            sums[param] += param.grad.double()
    return sums, segments


def assert_close(actual, expected, tolerance):
    if expected.numel():
        scale = max(expected.abs().max().item(), 1e-30)
        assert (actual.double() - expected.double()).abs().max().item() <= tolerance * scale


def assert_same_gradients(model, reference, tolerance=1e-5):
    """Segments and .grad of the one add up to .grad of the other; the segments."""
    sums, segments = totals(model.parameters())
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(sums[param], other.grad, tolerance)
    return segments


def check(model, run, track, *, mode="rows", captured=None, passes=1, tolerance=None, wrap=None):
    """Runs forward and backward with a copy and with the tracked model. `captured` names the parameters
    that must have come as segments only; None: all. `wrap` is what runs instead of the tracked model."""
    reference = copy.deepcopy(model)
    track(model, mode)
    state = torch.get_rng_state()
    for _ in range(passes):
        run(reference).backward()
    torch.set_rng_state(state)
    runner = model if wrap is None else wrap(model)
    for _ in range(passes):
        run(runner).backward()
    named = dict(model.named_parameters())
    dense = {name: param.grad for name, param in named.items()}
    sums, segments = (take if mode == "rows_and_dense" else totals)(named.values())
    biases = [ops.capture_folded_bias(param) for param in named.values()]
    for (name, param), other in zip(named.items(), reference.parameters(), strict=True):
        if other.grad is None:
            assert dense[name] is None and not segments[param], name
            continue
        allowed = tolerance or TOLERANCE[param.dtype]
        is_captured = captured is None or name in captured
        if mode != "rows_and_dense" or is_captured:
            assert_close(sums[param], other.grad, allowed)
        if mode == "rows_and_dense":
            assert_close(dense[name], other.grad, allowed)
        elif is_captured:
            assert dense[name] is None, name
        if is_captured:
            assert segments[param] or any(param is bias for bias in biases), name
            assert ops.capture_reason(param) == "", name
        elif captured is not None:
            assert not segments[param], name
            assert ops.capture_reason(param) != "", name
    return segments


def square(output):
    """A loss in float64."""
    return output.double().square().sum()


def loss_of(output):
    """In float64, and such that no gradient of a norm, or below one, is zero."""
    return (output.double() + 0.3).sin().sum()


def per_sample(param, segments):
    """The part of each sample in the gradient, samples first, in float64. All segments have all samples."""
    total = 0
    for segment in segments:
        assert segment.even
        samples = segment.samples
        parts = torch.zeros(samples, *param.shape, dtype=torch.float64)
        matrix = parts.view(samples, param.shape[0], -1)
        if segment.kind == "indexed":
            index = segment.index.view(samples, -1)
            for s, x in enumerate(segment.x.double().view(samples, index.shape[1], -1)):
                matrix[s].index_add_(0, index[s], x)
        else:
            a = segment.a.double().view(samples, -1, segment.a.shape[1])
            d = segment.d.double().view(samples, -1, segment.d.shape[1])
            matrix[:, segment.out_begin : segment.out_begin + d.shape[2]] = d.mT @ a
        total = total + parts
    return total


def bias_per_sample(bias, segments):
    total = torch.zeros(segments[0].samples, len(bias), dtype=torch.float64)
    for segment in segments:
        if segment.has_bias:
            rows = segment.d.double().view(segment.samples, -1, segment.d.shape[1]).sum(1)
            total[:, segment.out_begin : segment.out_begin + rows.shape[1]] += rows
    return total
