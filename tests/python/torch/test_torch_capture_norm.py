"""Capture by samples: norm layers have segments, and the rows of a sample are found wherever they are.

Two identities: segments and .grad add up to torch's gradient, and the squares of what each sample adds are
those of gradients that are computed for one sample at a time.
"""

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from capture_util import (  # noqa: E402
    assert_close,
    assert_same_gradients,
    check,
    loss_of,
    ops,
    per_sample,
    totals,
    tracker,
)

track = pytest.fixture(tracker)


# One norm layer

LAST = [(nn.LayerNorm, {}), (nn.LayerNorm, {"bias": False}), (nn.RMSNorm, {}), (nn.RMSNorm, {"eps": 0.1})]
NORMS = [
    *((kind, (7,), options, shape) for kind, options in LAST for shape in ((4, 7), (4, 3, 7), (4, 3, 2, 7))),
    *((kind, ((5, 7),), options, shape) for kind, options in LAST for shape in ((4, 5, 7), (4, 3, 5, 7))),
    (nn.LayerNorm, ((3, 2, 5),), {}, (4, 3, 2, 5)),
    (nn.LayerNorm, (7,), {}, (7,)),
    *((nn.GroupNorm, (groups, 6), {}, (4, 6, *rest)) for groups in (1, 2) for rest in ((), (5,), (3, 2))),
    (nn.GroupNorm, (6, 6), {}, (4, 6, 5)),
    (nn.BatchNorm1d, (6,), {}, (4, 6)),
    (nn.BatchNorm1d, (6,), {}, (4, 6, 5)),
    (nn.BatchNorm2d, (6,), {}, (4, 6, 3, 2)),
    (nn.BatchNorm2d, (6,), {"track_running_stats": False}, (4, 6, 3, 2)),
    (nn.BatchNorm2d, (6,), {"momentum": None, "eps": 0.1}, (4, 6, 3, 2)),
    (nn.BatchNorm3d, (6,), {}, (2, 6, 3, 2, 2)),
    (nn.InstanceNorm1d, (6,), {"affine": True}, (4, 6, 5)),
    (nn.InstanceNorm1d, (6,), {"affine": True}, (1, 6, 5)),
    (nn.InstanceNorm2d, (6,), {"affine": True, "track_running_stats": True}, (4, 6, 3, 2)),
    (nn.InstanceNorm1d, (6,), {"affine": True}, (6, 5)),
]


def name_of(case):
    kind, args, options, shape = case
    return f"{kind.__name__}{args}{options}{shape}"


def randomise(model):
    for param in model.parameters():
        nn.init.normal_(param)
    return model


def expected_parts(norm, x, grad):
    """What each sample adds: the norm without its parameters, then a weight and a bias for each sample."""
    plain = copy.deepcopy(norm)
    plain.weight = None
    if getattr(norm, "bias", None) is not None:
        plain.bias = None
    x_hat = plain(x)
    last = isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
    samples = x.shape[0]
    if (last and x.dim() == norm.weight.dim()) or (isinstance(norm, nn.InstanceNorm1d) and x.dim() == 2):
        samples, x_hat, grad = 1, x_hat.unsqueeze(0), grad.unsqueeze(0)
    if last:
        shape = (samples, -1, *norm.weight.shape)
        return (grad * x_hat).reshape(shape).sum(1), grad.reshape(shape).sum(1)
    shape = (samples, norm.weight.shape[0], -1)
    return (grad * x_hat).reshape(shape).sum(2), grad.reshape(shape).sum(2)


# Images can have their channels last, too.
LAYOUTS = [
    pytest.param(case, layout, id=f"{name_of(case)}-{layout}")
    for case in NORMS
    for layout in ("contiguous", "strided", "channels_last")
    if layout != "channels_last" or len(case[-1]) == 4
]


@pytest.mark.parametrize(("case", "layout"), LAYOUTS)
def test_norms(track, case, layout):
    kind, args, options, shape = case
    x = (torch.randn(shape, dtype=torch.float64) + 0.5).requires_grad_()
    if layout == "strided":
        x = x.detach().mT.contiguous().mT if x.dim() > 1 else torch.stack([x.detach()] * 2, 1)[:, 0]
        x.requires_grad_()
    elif layout == "channels_last":
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    model = randomise(kind(*args, **options).double())
    reference = copy.deepcopy(model)
    track(model, "samples")
    y, expected = model(x), reference(x)
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    (expected_x,) = torch.autograd.grad(expected, [x], grad, retain_graph=True)
    expected.backward(grad)
    x.grad = None
    y.backward(grad)
    assert_close(x.grad, expected_x, 1e-12)
    assert all(param.grad is None for param in model.parameters())
    sums, segments = totals(model.parameters())
    parts = expected_parts(reference.requires_grad_(False).train(), x.detach(), grad)
    for (name, param), part in zip(model.named_parameters(), parts, strict=False):
        assert_close(sums[param], getattr(reference, name).grad, 1e-12)
        assert_close(per_sample(param, segments[param]), part, 1e-12)
        assert_close(per_sample(param, segments[param]).square().sum(0), part.square().sum(0), 1e-12)
        assert ops.capture_reason(param) == ""
    for mine, theirs in zip(model.buffers(), copy.deepcopy(reference).buffers(), strict=True):
        assert mine.shape == theirs.shape


def test_running_statistics_are_torchs(track):
    model = nn.Sequential(nn.BatchNorm2d(6), nn.InstanceNorm2d(6, affine=True, track_running_stats=True))
    reference = copy.deepcopy(model)
    track(model, "samples")
    for _ in range(3):
        x = torch.randn(4, 6, 3, 2)
        loss_of(model(x)).backward()
        loss_of(reference(x)).backward()
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_evaluation_mode_uses_the_statistics_of_then(track, kind):
    model = randomise(kind(6, affine=True, track_running_stats=True).double())
    x = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    model(2 * x.detach() + 1)
    model.eval()
    reference = copy.deepcopy(model)
    track(model, "samples")
    y = model(x)
    with torch.no_grad():
        model.running_mean.add_(7)
    (expected_x,) = torch.autograd.grad(loss_of(reference(x)), [x])
    loss_of(reference(x)).backward()
    x.grad = None
    loss_of(y).backward()
    assert_close(x.grad, expected_x, 1e-12)
    segments = assert_same_gradients(model, reference, 1e-12)
    assert segments[model.weight][0].samples == 4
    assert model.weight.grad is None and model.bias.grad is None


def test_a_field_that_a_layer_does_not_have_is_an_error():
    layer = ops.Layer()
    layer.dense_square = torch.zeros(2)
    with pytest.raises(AttributeError, match="square_of_dense"):
        layer.square_of_dense = torch.zeros(2)


# Ways to run


def mixed_net():
    return nn.Sequential(
        nn.Conv1d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm1d(6),
        nn.GELU(),
        nn.GroupNorm(2, 6),
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.RMSNorm(8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.InstanceNorm1d(6, affine=True),
        nn.Linear(8, 3),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes(track, dtype):
    x = torch.randn(4, 2, 8).to(dtype)
    segments = check(
        mixed_net().to(dtype),
        lambda m: loss_of(m(x)),
        track,
        mode="samples",
        tolerance=0.1 if dtype == torch.bfloat16 else None,
    )
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    assert all(s.d.dtype == wide for kept in segments.values() for s in kept if s.a.shape[1] == 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(track, dtype):
    x = torch.randn(4, 2, 8)

    def run(module):
        with torch.autocast("cpu", dtype=dtype):
            return module(x).float().square().mean()

    check(mixed_net(), run, track, mode="samples", tolerance=0.1)


def test_accumulation_and_a_module_used_twice(track):
    x = torch.randn(4, 3, 8)
    norm = nn.LayerNorm(8)
    segments = check(norm, lambda m: loss_of(m(m(x).tanh())), track, mode="samples", passes=2)
    assert {len(kept) for kept in segments.values()} == {2}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_captures_once(track, reentrant):
    x = torch.randn(4, 2, 8, requires_grad=True)

    def run(module):
        y = checkpoint(module[:5], x, use_reentrant=reentrant)
        return loss_of(checkpoint(module[5:], y, use_reentrant=reentrant))

    segments = check(mixed_net(), run, track, mode="samples")
    assert {len(kept) for kept in segments.values()} == {0, 1}
    assert {s.samples for kept in segments.values() for s in kept} == {4}


def test_other_modes_leave_norms_to_torch(track):
    x = torch.randn(4, 2, 8)
    for mode in ("rows", "rows_and_dense"):
        model = mixed_net()
        norms = {
            n
            for n, p in model.named_parameters()
            if p.dim() == 1 and not hasattr(model[int(n[0])], "kernel_size")
        }
        norms -= {f"{i}.bias" for i, layer in enumerate(model) if isinstance(layer, nn.Linear)}
        captured = {n for n, _ in model.named_parameters()} - norms
        check(model, lambda m: loss_of(m(x)), track, mode=mode, captured=captured)
        assert ops.capture_reason(model[5].weight) == "its gradient came from an op without factors"


def test_without_a_graph_nothing_is_kept(track):
    model = mixed_net()
    track(model, "samples")
    x = torch.randn(4, 2, 8)
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        model(x)
    model(x)
    assert all(ops.capture_count(param) == 0 for param in model.parameters())


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.BatchNorm1d])
def test_frozen(track, kind, frozen):
    x = torch.randn(4, 6, requires_grad=True)
    model = kind(6)
    getattr(model, frozen).requires_grad_(False)
    captured = ["bias" if frozen == "weight" else "weight"]
    check(model, lambda m: loss_of(m(x)), track, mode="samples", captured=captured)


def test_only_the_bias_is_tracked(track):
    x = torch.randn(4, 6)
    model = nn.LayerNorm(6)
    reference = copy.deepcopy(model)
    track([model.bias], "samples")
    for module in (model, reference):
        loss_of(module(x)).backward()
    assert model.bias.grad is None
    assert_close(model.weight.grad, reference.weight.grad, 1e-6)
    assert_close(ops.capture_take(model.bias)[0].d.sum(0), reference.bias.grad, 1e-6)


def test_a_hook_on_the_parameter_gets_its_gradient(track):
    x = torch.randn(4, 6)
    for kind in (nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm):
        model = kind(6)
        reference = copy.deepcopy(model)
        track(model, "samples")
        for module in (model, reference):
            module.weight.register_hook(lambda grad: 2 * grad)
            loss_of(module(x)).backward()
        assert_close(model.weight.grad, reference.weight.grad, 1e-6)
        assert ops.capture_count(model.weight) == 0
        assert ops.capture_reason(model.weight) == "a hook on it wants its gradient"


def test_the_mode_may_change_before_backward(track):
    x = torch.randn(4, 2, 8)
    model = mixed_net()
    reference = copy.deepcopy(model)
    track(model, "samples")
    loss = loss_of(model(x))
    track(model, "rows")
    loss.backward()
    loss_of(reference(x)).backward()
    segments = assert_same_gradients(model, reference)
    assert not segments[model[5].weight] and model[5].weight.grad is not None


def test_a_norms_bias_that_is_also_a_linear_layers(track):
    for first in ("norm", "linear"):
        model = nn.ModuleDict({"norm": nn.LayerNorm(6), "linear": nn.Linear(6, 6)})
        model["linear"].bias = model["norm"].bias
        reference = copy.deepcopy(model)
        track(model, "samples")
        x = torch.randn(4, 6)
        for module in (model, reference):
            y = (
                module["norm"](module["linear"](x))
                if first == "linear"
                else module["linear"](module["norm"](x))
            )
            loss_of(y).backward()
        segments = assert_same_gradients(model, reference)
        bias = model["norm"].bias
        # Whoever takes the weight's rows for the bias does not look for more.
        assert bool(segments[bias]) != (ops.capture_folded_bias(model["linear"].weight) is bias)
        assert ops.capture_reason(bias) != ""


def test_double_backward_is_torchs(track):
    net = mixed_net().double()
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    results = []
    for tracked in (False, True):
        model = copy.deepcopy(net)
        if tracked:
            track(model, "samples")
        loss = loss_of(model(x))
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        total = loss + sum(grad.square().sum() for grad in grads)
        results.append(torch.autograd.grad(total, list(model.parameters())))
        assert not tracked or all(ops.capture_count(param) == 0 for param in model.parameters())
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert_close(mine, theirs, 1e-9)


def test_chosen_inputs_get_dense_gradients(track):
    model = mixed_net()
    reference = copy.deepcopy(model)
    track(model, "samples")
    x = torch.randn(4, 2, 8)
    params = list(model.parameters())
    expected = torch.autograd.grad(loss_of(reference(x)), list(reference.parameters()))
    for mine, theirs in zip(torch.autograd.grad(loss_of(model(x)), params), expected, strict=True):
        assert_close(mine, theirs, 1e-4)
    loss_of(model(x)).backward(inputs=[model[5].weight])
    assert model[5].weight.grad is not None
    assert "inputs=" in ops.capture_reason(model[5].weight)


def test_retained_graphs_add_up(track):
    model = mixed_net()
    reference = copy.deepcopy(model)
    track(model, "samples")
    x = torch.randn(4, 2, 8)
    for module in (reference, model):
        loss = loss_of(module(x))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, reference, 1e-4)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_empty_batches(track):
    model = nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.RMSNorm(6), nn.Linear(6, 3))
    track(model, "samples")
    loss_of(model(torch.randn(0, 7))).backward()
    sums, _ = totals(model.parameters())
    assert all(not total.any() for total in sums.values())


def test_functorch_does_without_us(track):
    model = nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6))
    reference = copy.deepcopy(model)
    track(model, "samples")
    x = torch.randn(5, 7)

    def grads(module):
        def loss(params, row):
            return torch.func.functional_call(module, params, (row.unsqueeze(0),)).square().sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(module.named_parameters()), x)

    for mine, theirs in zip(grads(model).values(), grads(reference).values(), strict=True):
        assert_close(mine, theirs, 1e-5)
    _, tangent = torch.func.jvp(model, (x,), (x,))
    assert_close(tangent, torch.func.jvp(reference, (x,), (x,))[1], 1e-5)
    assert all(ops.capture_count(param) == 0 for param in model.parameters())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_norms_are_torchs(track, backend):
    torch._dynamo.reset()
    x = torch.randn(4, 2, 8)
    model = mixed_net()
    reference = copy.deepcopy(model)
    track(model, "samples")
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        loss_of(compiled(x)).backward()
        loss_of(reference(x)).backward()
    segments = assert_same_gradients(model, reference, 1e-4)
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert_close(mine, theirs, 1e-5)
    assert segments[model[4].weight] and not segments[model[5].weight]
    assert ops.capture_reason(model[5].weight) == "its gradient came from an op without factors"


def test_compiled_norms_of_batches_that_change(track):
    torch._dynamo.reset()
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.GroupNorm(2, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 8),
    )
    reference = copy.deepcopy(model)
    track(model, "samples")
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 2):
        x = torch.randn(rows, 8)
        loss_of(compiled(x)).backward()
        loss_of(reference(x)).backward()
    assert_same_gradients(model, reference, 1e-4)


def test_a_wrong_shape_is_torchs_error(track):
    for model, x in (
        (nn.LayerNorm(6), torch.randn(4, 5)),
        (nn.GroupNorm(2, 6), torch.randn(4, 5)),
        (nn.BatchNorm1d(6), torch.randn(4, 5)),
    ):
        track(model, "samples")
        with pytest.raises(RuntimeError):
            model(x)
