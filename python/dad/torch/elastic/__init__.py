"""Elastic training with PyTorch: `hvd.elastic`."""

from dad.elastic.run import run, run_fn
from dad.elastic.state import ObjectState, State
from dad.torch.elastic.sampler import ElasticSampler
from dad.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "run_fn"]
