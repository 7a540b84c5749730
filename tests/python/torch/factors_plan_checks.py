"""What a plan says: launched with test_torch_factors_use.py."""

import torch
from torch import nn

from factor_util import D
from test_torch_factors_use import data, distributed, net
from util import hvd


def check_what_does_not_fit_is_logged_once():
    import logging

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("dad")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = nn.Sequential(
            nn.Linear(D, D), nn.LayerNorm(D), nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        )
        optimizer = distributed(model, "dad", torch.optim.SGD(model.parameters(), lr=1e-3))
        for rows in (2, 2, 4, 4):  # with a new plan in between
            optimizer.zero_grad()
            model(data(rows, torch.float32)).sum().backward()
            optimizer.step()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    if hvd().rank() > 0:
        assert not lines
        return
    plan = {row["name"]: row["why"] for row in optimizer.plan() if row["method"] == "dense"}
    said = [
        (level, name) for level, line in lines for name in plan if f'"{name}"' in line and plan[name] in line
    ]
    weights = [f"2.parametrizations.weight.original{i}" for i in (0, 1)]
    assert sorted(said) == sorted(
        [("INFO", n) for n in plan if n not in weights] + [("WARNING", n) for n in weights]
    )


def check_the_plan_has_the_columns_of_the_contract():
    model = net(torch.float32)
    optimizer = distributed(model, "rank_dad:rank=2")
    for _ in range(3):
        optimizer.zero_grad()
        model(data(dtype=torch.float32)).sum().backward()
        optimizer.step()
    rows = optimizer.plan()
    assert [row["name"] for row in rows] == [n for n, _ in model.named_parameters()]
    columns = ["name", "shape", "rows", "method", "why", "predicted_ms", "measured_ms"]
    columns += ["predicted_bytes", "measured_bytes", "dense_bytes", "bytes", "ratio"]
    assert all(list(row) == columns for row in rows)
    first = rows[0]
    assert first["shape"] == (D, D) and first["rows"] == 2 and first["method"] == "rank_dad" and first["why"]
    assert (
        first["predicted_ms"] > 0 and first["measured_ms"] > 0 and first["bytes"] > 0 and first["ratio"] > 1
    )
    assert first["bytes"] == first["measured_bytes"] > 0 and first["predicted_bytes"] > 0
    tensors = hvd().stats()["tensors"]
    assert 1 <= tensors["0.weight"]["effective"] <= 4  # gather: 2 of each rank
    assert tensors["0.weight"]["steps"] >= 3


def check_the_plan_counts_what_its_method_sends():
    # The weights were broadcast, and two steps were dense: neither is a part of what the method sends.
    model = net(torch.float32)
    hvd().broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = distributed(model, "rank_dad:rank=2,warmup_steps=2")
    hvd().reset_stats()
    hvd().broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(6):
        optimizer.zero_grad()
        model(data(dtype=torch.float32)).sum().backward()
        optimizer.step()
    row = next(row for row in optimizer.plan() if row["name"] == "2.weight")
    tensors = hvd().stats()["tensors"]
    gradient = tensors[row["name"]]
    assert gradient["steps"] == 6 and gradient["recent"]["steps"] == 4, gradient
    assert row["bytes"] == round(gradient["recent"]["wire_bytes_sent"] / 4)
    assert row["ratio"] > 4 * gradient["ratio"], (row, gradient)
    assert tensors["broadcast." + row["name"]]["steps"] == 1, tensors
