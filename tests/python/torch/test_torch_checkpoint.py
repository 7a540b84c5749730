"""A job that stops and goes on from a checkpoint in new processes ends with the bits of one that did not stop."""

import os
from pathlib import Path

from util import hvd, launch, needs_torch

try:
    import torch
    from torch import nn
except ImportError:
    torch = None

NUM_RANKS = 3
METHODS = [
    "rank_dad:rank=2",
    "rank_dad:rank=2,combine=power",
    "int8",
    "auto",
    "vgc",
    "vgc_strom",
    "topk",
    "chunk_topk",
    "qsgd",
]
SAVED_AFTER, STEPS = 7, 12


def test_a_job_that_stops_and_goes_on_has_the_bits_of_one_that_does_not(tmp_path):
    needs_torch()
    for phase in ("straight", "resumed"):
        launch(__file__, NUM_RANKS, FOLDER=str(tmp_path), PHASE=phase).assert_passed("check_the_job")
    for rank in range(NUM_RANKS):
        for method in METHODS:
            weights = [
                torch.load(tmp_path / f"{phase}.{method}.{rank}.pt", weights_only=True)
                for phase in ("straight", "resumed")
            ]
            for name, straight in weights[0].items():
                assert torch.equal(straight, weights[1][name]), f"{method}: {name}"


def check_the_job():
    for method in METHODS:
        train(method, Path(os.environ["FOLDER"]), os.environ["PHASE"])


def train(method, folder, phase):
    torch.manual_seed(0 if phase == "straight" else 1)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32))
    optimizer = hvd().DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters(), compression=method
    )
    checkpoint = folder / f"checkpoint.{method}.{hvd().rank()}.pt"
    begin = 0
    if phase == "resumed":
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        states, loaded = (of["dad"]["states"] for of in (saved["optimizer"], optimizer.state_dict()))
        assert loaded.keys() == states.keys(), method
        for name, tensors in states.items():
            for key, tensor in tensors.items():
                assert torch.equal(loaded[name][key], tensor), (method, name, key)
        begin = SAVED_AFTER
    for step in range(begin, STEPS):
        generator = torch.Generator().manual_seed(100 * step + hvd().rank())
        optimizer.zero_grad()
        model(torch.randint(40, (2 + hvd().rank(), 4), generator=generator)).square().sum().backward()
        optimizer.step()
        hvd().check_replicas(model)
        if step + 1 == SAVED_AFTER and phase == "straight":
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    torch.save(model.state_dict(), folder / f"{phase}.{method}.{hvd().rank()}.pt")
