"""Capture: links between layers that follow each other, which edad recomputes gradients with."""

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from capture_util import assert_close, assert_same_gradients, check, ops, square, tracker  # noqa: E402

track = pytest.fixture(tracker)


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "leaky_relu": nn.LeakyReLU(0.2),
    "leaky_relu in place": nn.LeakyReLU(0.2, inplace=True),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
}


def derivative(link, output, hidden):
    """φ', from the activation's output where that is enough."""
    if link.activation == "relu":
        return (output > 0).to(output.dtype)
    if link.activation == "leaky_relu":
        return torch.where(output > 0, 1.0, link.slope).to(output.dtype)
    if link.activation == "tanh":
        return 1 - output**2
    if link.activation == "sigmoid":
        return output * (1 - output)
    hidden = hidden.detach().requires_grad_()
    functions = {
        "gelu": F.gelu,
        "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
        "silu": F.silu,
    }
    functions[link.activation](hidden).sum().backward()
    return hidden.grad


def check_links(model, loss, track, expected):
    """Every link that is expected is there, and gives the D that the segment has."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    ids = {}
    for layer in layers:
        ids[layer] = track(layer)[0]
    loss(model).backward()
    kept = {layer: ops.capture_take(layer.weight) for layer in layers}
    linked = [layer for layer in layers if any(segment.link for segment in kept[layer])]
    assert linked == [layers[i] for i in expected]
    for layer in linked:
        for segment in kept[layer]:
            link = segment.link
            (above,) = [other for other in layers if ids[other] == link.upper_id]
            upper = kept[above][link.upper_index]
            assert upper.serial == link.upper_serial
            with torch.no_grad():
                hidden = F.linear(segment.a, layer.weight, layer.bias)
            delta = (upper.d @ above.weight.detach()) * derivative(link, upper.a, hidden)
            assert_close(delta, segment.d, 1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)])
def test_a_chain_of_five_is_linked(track, activation, shape):
    x = torch.randn(shape)
    sizes = [5, 7, 6, 8, 4, 3]
    layers = []
    for i in range(5):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), copy.deepcopy(ACTIVATIONS[activation])]
    model = nn.Sequential(*layers[:-1])
    check_links(model, lambda m: square(m(x)), track, [0, 1, 2, 3])
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight.grad = layer.bias.grad = None
    check(model, lambda m: square(m(x)), track)


def test_links_within_accumulated_passes(track):
    x = torch.randn(6, 5)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    check_links(model, lambda m: square(m(x)) + square(m(2 * x)), track, [0])


def test_links_through_a_reshape(track):
    x = torch.randn(2, 3, 5)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Flatten(0, 1), nn.Linear(4, 3))
    check_links(model, lambda m: square(m(x)), track, [0])
    other = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Flatten(1), nn.Linear(12, 3))
    check_links(other, lambda m: square(m(x)), track, [])


def test_dropout_ends_a_chain(track):
    x = torch.randn(6, 5)
    model = nn.Sequential(
        nn.Linear(5, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)
    )
    check_links(model, lambda m: square(m(x)), track, [1])
    check_links(copy.deepcopy(model).eval(), lambda m: square(m(x)), track, [0, 1])


def _residual(m, x):
    hidden = m[0](x)
    return square(m[2](hidden.relu()) + hidden)


def _residual_after(m, x):
    hidden = m[0](x).relu()
    return square(m[2](hidden) + hidden)


def _residual_at_the_root(m, x):
    hidden = m[0](x).relu()
    return (m[2](hidden), hidden)


def _shared(m, x):
    hidden = m[0](x).relu()
    return square(m[2](hidden)) + square(m[2](hidden))


def _changed_in_place(m, x):
    return square(m[2](F.silu(m[0](x)).mul_(2)))


def _hook_on_the_activation(m, x):
    hidden = m[0](x).relu()
    hidden.register_hook(lambda grad: 2 * grad)
    return square(m[2](hidden))


def _hook_below_the_activation(m, x):
    hidden = m[0](x)
    hidden.register_hook(lambda grad: 2 * grad)
    return square(m[2](hidden.relu()))


def _hook_on_the_node(m, x):
    hidden = m[0](x).relu()
    loss = square(m[2](hidden))
    hidden.grad_fn.register_prehook(lambda grads: (2 * grads[0],))
    return loss


def _hook_after_the_node(m, x):
    hidden = m[0](x).relu()
    loss = square(m[2](hidden))
    hidden.grad_fn.register_hook(lambda outputs, inputs: (2 * outputs[0],))
    return loss


@pytest.mark.parametrize(
    "run",
    [
        _residual,
        _residual_after,
        _shared,
        _changed_in_place,
        _hook_on_the_activation,
        _hook_below_the_activation,
        _hook_on_the_node,
        _hook_after_the_node,
    ],
)
def test_what_breaks_a_link(track, run):
    x = torch.randn(6, 5)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    reference = copy.deepcopy(model)
    check_links(model, lambda m: run(m, x), track, [])
    model.zero_grad()
    run(reference, x).backward()
    run(model, x).backward()
    assert_same_gradients(model, reference)


def test_a_second_root_breaks_a_link(track):
    x = torch.randn(6, 5)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    track(model)
    outputs = _residual_at_the_root(model, x)
    torch.autograd.backward(outputs, [torch.ones(6, 5), torch.ones(6, 5)])
    assert ops.capture_take(model[0].weight)[0].link is None
    hidden = model[0](x).relu()
    (model[2](hidden) + hidden).backward(torch.ones(6, 5))
    assert ops.capture_take(model[0].weight)[0].link is None
    hidden = model[0](x).relu()
    model[2](hidden).backward(torch.ones(6, 5))
    assert ops.capture_take(model[0].weight)[0].link is not None


def test_a_looking_hook_and_retained_gradients_do_not_break_a_link(track):
    x = torch.randn(6, 5)

    def run(m):
        hidden = m[0](x).relu()
        hidden.retain_grad()
        hidden.register_hook(lambda grad: None)
        return square(m[2](hidden))

    check_links(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)), run, track, [0])


def test_a_frozen_bias_breaks_only_links_that_need_it(track):
    x = torch.randn(6, 5)
    for activation, expected in ((nn.ReLU(), [0]), (nn.GELU(), [])):
        model = nn.Sequential(nn.Linear(5, 5), activation, nn.Linear(5, 5))
        model[0].bias.requires_grad_(False)
        check_links(model, lambda m: square(m(x)), track, expected)
