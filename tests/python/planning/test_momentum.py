"""chunk_topk(on="momentum") is for plain SGD and sign descent: any other optimizer is refused by name."""

import pytest

from dad.methods.compression import Compression as C
from dad.methods.momentum import require_plain_optimizer

ON_MOMENTUM = C.chunk_topk(decay=0.9, on="momentum")


def make(name, base=object, **members):
    return type(name, (base,), members)()


def test_torch_optimizers():
    torch = pytest.importorskip("torch")
    import dad.torch as hvd

    def distributed(cls, compression=ON_MOMENTUM, **options):
        weights = [torch.nn.Parameter(torch.zeros(3))]
        named = [("w", weights[0])]
        return hvd.DistributedOptimizer(cls(weights, **options), named, compression=compression)

    class SignSGD(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

    hvd.init()
    try:
        for options in ({}, {"weight_decay": 0.1}, {"maximize": True}):
            distributed(torch.optim.SGD, lr=0.1, **options)
        distributed(SignSGD, lr=0.1)
        with pytest.raises(ValueError, match="optimizer SGD, which has momentum=0.9.*on='gradient'"):
            distributed(torch.optim.SGD, lr=0.1, momentum=0.9)
        for cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
            with pytest.raises(ValueError, match=f"optimizer {cls.__name__}, which keeps moments"):
                distributed(cls, lr=0.1)
            distributed(cls, C.chunk_topk(decay=0.9), lr=0.1)
        with pytest.raises(ValueError, match="local steps.*on='gradient'"):
            weight = torch.nn.Parameter(torch.zeros(3))
            plain = torch.optim.SGD([weight], lr=0.1)
            hvd.DistributedOptimizer(plain, [("w", weight)], compression=ON_MOMENTUM, local_steps=4)
        with pytest.raises(ValueError, match="Adam"):
            distributed(torch.optim.Adam, C.per_layer({"fc*": ON_MOMENTUM, "*": "none"}), lr=0.1)
    finally:
        hvd.shutdown()


def test_optimizers_of_keras_and_of_tf1():
    keras_sgd = make("SGD", get_config=lambda self: {"momentum": 0.0, "nesterov": False})
    with_momentum = make("SGD", get_config=lambda self: {"momentum": 0.5})
    require_plain_optimizer(ON_MOMENTUM, keras_sgd)
    require_plain_optimizer(ON_MOMENTUM, make("GradientDescentOptimizer"))
    require_plain_optimizer(ON_MOMENTUM, make("LossScaleOptimizer", inner_optimizer=keras_sgd))
    for optimizer, words in (
        (with_momentum, "SGD, which has momentum=0.5"),
        (make("Lion", get_config=lambda self: {}), "Lion, which keeps moments"),
        (make("LossScaleOptimizer", inner_optimizer=with_momentum), "SGD, which has"),
        (make("AdamOptimizer"), "AdamOptimizer"),
    ):
        with pytest.raises(ValueError, match=words):
            require_plain_optimizer(ON_MOMENTUM, optimizer)
        require_plain_optimizer(C.chunk_topk(), optimizer)
