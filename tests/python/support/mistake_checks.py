"""Mistakes in a script, each with the sentence that its author gets. On two ranks, in one launch of torch.

The table in test_mistakes.py has the mistakes that end a whole job.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch

from util import hvd


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def wrapped(net: torch.nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hvd().DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), **options)


def says(kind: type[BaseException], words: tuple[str, ...], function: Any, *args: Any, **kwargs: Any) -> None:
    """The mistake raises this, with the cause and the cure in the message."""
    with pytest.raises(kind) as raised:
        function(*args, **kwargs)
    text = " ".join(str(raised.value).split())
    assert all(word in text for word in words), text


def check_optimizer_without_named_parameters_of_its_model():
    other = model()
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    words = ("named_parameters misses parameters of the optimizer", "group 0, parameter 0")
    says(ValueError, words, hvd().DistributedOptimizer, optimizer, other.named_parameters())


def check_two_models_with_the_same_names():
    first, second = model(), model()
    parameters = [*first.parameters(), *second.parameters()]
    named = [*first.named_parameters(), *second.named_parameters()]
    words = ("names that are not unique", "0.weight")
    says(ValueError, words, hvd().DistributedOptimizer, torch.optim.SGD(parameters, lr=0.1), named)


def check_optimizer_wrapped_twice():
    says(ValueError, ("is a DistributedOptimizer already",), hvd().DistributedOptimizer, wrapped(model()))


def check_model_in_the_place_of_the_optimizer():
    words = ("a Sequential is not a torch.optim.Optimizer",)
    says(ValueError, words, hvd().DistributedOptimizer, model())


def check_method_that_does_not_exist():
    words = ("no method 'rankdad'", "did you mean rank_dad?")
    says(ValueError, words, wrapped, model(), compression="rankdad")


def check_option_of_another_method():
    words = ("there is no option rank", "its options: warmup_steps, ratio")
    says(ValueError, words, wrapped, model(), compression="topk:rank=4")


def check_method_with_an_op_that_needs_whole_gradients():
    words = ("works for op=Average and op=Sum only",)
    says(ValueError, words, wrapped, model(), compression="rank_dad", op=hvd().Adasum)


def check_method_with_state_for_a_single_collective():
    words = ("keeps state from step to step", "give it to DistributedOptimizer")
    says(ValueError, words, hvd().allreduce, torch.ones(2), compression="int8")


def check_backward_passes_of_zero():
    words = ("backward_passes_per_step=0 is not possible; 1 or more",)
    says(ValueError, words, wrapped, model(), backward_passes_per_step=0)


def check_op_and_average():
    says(ValueError, ("give op only",), hvd().allreduce, torch.ones(2), average=True, op=hvd().Sum)


def check_array_in_the_place_of_a_tensor():
    words = ("expected a torch.Tensor, got ndarray", "torch.as_tensor()")
    says(ValueError, words, hvd().allreduce, torch.ones(2).numpy())


def check_dtype_that_cannot_be_sent():
    words = ("is not supported; convert the tensor first",)
    says(ValueError, words, hvd().allreduce, torch.ones(2, dtype=torch.complex64))


def check_splits_that_do_not_add_up():
    words = ("splits [1, 1] do not add up to the tensor's 3 rows",)
    says(ValueError, words, hvd().alltoall, torch.ones(3), splits=[1, 1])


def check_root_that_is_no_rank():
    says(ValueError, ("root rank 7",), hvd().broadcast, torch.ones(2), root_rank=7)


def check_process_set_that_was_not_added():
    words = ("was not given to init() or add_process_set()",)
    says(ValueError, words, hvd().allreduce, torch.ones(2), process_set=hvd().ProcessSet([0]))


def check_handle_that_was_waited_for_twice():
    handle = hvd().allreduce_async(torch.ones(2), name="twice")
    hvd().synchronize(handle)
    says(ValueError, ("has been synchronized already",), hvd().synchronize, handle)


def check_zero_grad_between_backward_and_step():
    net = model()
    optimizer = wrapped(net)
    net(torch.ones(1, 4)).sum().backward()
    words = ("zero_grad() between backward() and step()", "call step() or synchronize() first")
    says(AssertionError, words, optimizer.zero_grad)
    optimizer.step()


def check_shapes_that_differ():
    words = ('ranks disagree on "loss"', "[2] on rank 0, [3] on rank 1")
    says(hvd().MismatchError, words, hvd().allreduce, torch.ones(2 + hvd().rank()), name="loss")


def check_models_that_differ():
    net = torch.nn.Linear(4, 2 + hvd().rank())
    optimizer = wrapped(net)
    net(torch.ones(1, 4)).sum().backward()
    words = ("ranks disagree on the tensors", "Build the same model on all ranks")
    says(hvd().MismatchError, words, optimizer.step)


def check_parameters_that_were_not_broadcast():
    """Only a warning by default; this is the function that raises."""
    net = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(net.weight, hvd().rank())
    says(hvd().ReplicaError, ("replicas are not bit-equal", "weight", "rank 1"), hvd().check_replicas, net)


def check_checkpoint_that_is_not_there():
    words = ("rank 0", "No such file")
    says(hvd().CheckpointError, words, hvd().load, "/nowhere/run.pt", model=model())


def check_checkpoint_of_torch_save():
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "run.pt")
        torch.save({"model": model().state_dict()}, file)
        says(hvd().CheckpointError, ("was not written by hvd.save()",), hvd().load, file, model=model())


def check_optimizer_that_is_copied():
    import copy

    says(TypeError, ("cannot be copied or pickled", "state_dict()"), copy.deepcopy, wrapped(model()))
