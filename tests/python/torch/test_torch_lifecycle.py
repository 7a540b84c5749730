"""init and shutdown, forks, versions, reports."""

import json
import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from util import check_names, hvd, job_environment, launch, needs_torch

try:
    import torch
except ImportError:
    torch = None

NUM_RANKS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    needs_torch()
    path = tmp_path_factory.mktemp("report") / "report.jsonl"
    outcome = launch(__file__, NUM_RANKS, DAD_REPORT=str(path), DAD_PLAN="1")
    outcome.report = path
    return outcome


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_two_ranks(results, check):
    results.assert_passed(check)


def test_every_rank_reports_at_exit(results):
    lines = [json.loads(line) for line in results.report.read_text().splitlines()]
    assert {line["rank"] for line in lines} == {0, 1}
    assert all("wire_bytes_sent" in line["stats"] for line in lines)


def test_the_plan_is_printed_by_rank_0(results):
    assert "shown.weight" in results.output and "2 tensors" in results.output
    assert "what a step waited for gradients" in results.output
    assert any(
        "plan: 24 B → 24 B per step" in line and "measured" in line for line in results.output.splitlines()
    )
    assert results.output.count("shown.weight") == 1


def check_init_and_shutdown_many_times_leave_nothing_behind():
    import threading

    import psutil

    process = psutil.Process()

    def cycle(number):
        # The last to join goes on to shutdown() at once: the others must hear both in this order.
        assert hvd().join() in (0, 1), number
        hvd().shutdown()
        assert not hvd().is_initialized()
        hvd().init()
        assert hvd().allreduce(torch.full((10,), 1.0), op=hvd().Sum).tolist() == [2.0] * 10, number

    for number in range(10):
        cycle(number)
    before = process.num_threads(), process.num_fds(), threading.active_count()
    memory = process.memory_info().rss
    hvd().barrier()  # a peer that goes on to shutdown() takes its connection along
    for number in range(200):
        cycle(number)
    after = process.num_threads(), process.num_fds(), threading.active_count()
    assert all(b <= a for a, b in zip(before, after, strict=True)), (before, after)
    assert process.memory_info().rss - memory < 20 << 20


def check_static_process_sets():
    hvd().shutdown()
    with pytest.raises(ValueError, match="duplicate"):
        hvd().init(process_sets=[hvd().ProcessSet([0]), hvd().ProcessSet([0])])
    with pytest.raises(ValueError, match="duplicate"):
        hvd().init(process_sets=[hvd().ProcessSet([0, 1])])
    with pytest.raises(ValueError, match="possible"):
        hvd().init(process_sets=[hvd().ProcessSet([0, 7])])
    with pytest.raises(ValueError, match="comm"):
        hvd().init(comm=[0])
    sets = [hvd().ProcessSet([1]), hvd().ProcessSet([0])]
    hvd().init(comm=[0, 1], process_sets=sets)
    assert [s.process_set_id for s in sets] == [1, 2]
    mine = sets[0] if hvd().rank() == 1 else sets[1]
    assert hvd().allreduce(torch.ones(1), op=hvd().Sum, process_set=mine).item() == 1.0
    same = hvd().ProcessSet([0])
    hvd().init(process_sets=[same])
    assert same.process_set_id == 2
    hvd().shutdown()
    hvd().init(process_sets=[[1]])  # plain lists of ranks
    with pytest.raises(ValueError, match="use add_process_set"):
        hvd().init(process_sets=[hvd().ProcessSet([0])])
    hvd().shutdown()
    hvd().init(process_sets="dynamic")


class Communicator:
    """An mpi4py communicator of this rank alone, as a split by rank gives."""

    def Get_size(self):
        return 1

    def Get_rank(self):
        return hvd().rank()

    def allgather(self, value):
        return [value]


class World(Communicator):
    def __init__(self, rank):
        self.rank = rank

    def Get_rank(self):
        return self.rank

    def allgather(self, value):
        return [[0], [1]]


def check_parts_of_a_split_communicator_become_process_sets():
    rank = hvd().rank()
    hvd().shutdown()
    with patch("dad.process_sets._world_in_mpi", lambda: World(rank)):
        mine = hvd().ProcessSet(Communicator())
        hvd().init(process_sets=[mine])
    assert mine.ranks == [rank] and mine.process_set_id == rank + 1
    assert hvd().mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1], 1: [0], 2: [1]}
    assert hvd().allreduce(torch.ones(1), op=hvd().Sum, process_set=mine).item() == 1.0


def check_join_strict_rejects_what_horovod_rejects():
    hvd().shutdown()
    os.environ["HOROVOD_JOIN_STRICT"] = "1"
    try:
        hvd().init()
    finally:
        del os.environ["HOROVOD_JOIN_STRICT"]
    if hvd().rank() == 1:
        with pytest.raises(hvd().HorovodInternalError, match="rank 0 has joined.*HOROVOD_JOIN_STRICT"):
            hvd().allgather(torch.ones(2))
        assert hvd().allreduce(torch.ones(1), op=hvd().Sum).item() == 1.0
    assert hvd().join() == 1
    hvd().shutdown()
    hvd().init()
    if hvd().rank() == 1:  # by default rank 0 adds no rows
        assert hvd().allgather(torch.ones(2)).shape == (2,)
    assert hvd().join() == 1


def check_init_twice_is_once():
    hvd().init()
    hvd().init()
    assert hvd().size() == 2 and hvd().local_size() == 2 and hvd().cross_size() == 1
    assert hvd().local_rank() == hvd().rank() and hvd().cross_rank() == 0 and hvd().is_homogeneous()
    assert hvd().gloo_enabled() and not hvd().mpi_enabled()


def check_init_after_an_error_of_a_peer_needs_no_shutdown():
    for _ in range(2):
        if hvd().rank() == 0:
            hvd().shutdown()  # as a rank does that has caught an error of its own
        else:
            with pytest.raises(hvd().HorovodInternalError, match="rank 0 has shut down.* join\\(\\)"):
                hvd().allreduce(torch.ones(1), name="in vain")
        hvd().init()
        assert hvd().allreduce(torch.ones(1), op=hvd().Sum).item() == 2.0


def check_a_forked_child_starts_afresh():
    child = os.fork()
    if child == 0:
        fine = not hvd().is_initialized() and hvd().gloo_built() and hvd().nccl_built() == 0
        # An ordinary end, with the exit handlers of the interpreter.
        import atexit

        atexit._run_exitfuncs()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert hvd().allreduce(torch.ones(1), op=hvd().Sum).item() == 2.0


def check_handles_of_an_engine_that_is_gone_fail():
    rank = hvd().rank()
    handle = hvd().allreduce_async(torch.ones(2), name="never") if rank == 0 else None
    hvd().shutdown()
    if handle is not None:
        with pytest.raises(hvd().HorovodInternalError):
            hvd().synchronize(handle)
    hvd().init()


def check_a_report_that_cannot_be_written_keeps_nobody_waiting():
    report = os.environ["DAD_REPORT"]
    os.environ["DAD_REPORT"] = "/nowhere/report"
    try:
        hvd().shutdown()
    finally:
        os.environ["DAD_REPORT"] = report
    assert not hvd().is_initialized()
    hvd().init()
    assert hvd().allreduce(torch.ones(1), op=hvd().Sum).item() == 2.0


def check_the_plan_goes_to_stderr():
    model = torch.nn.ModuleDict({"shown": torch.nn.Linear(2, 2)})
    optimizer = hvd().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for _ in range(4):
        optimizer.zero_grad()
        model["shown"](torch.ones(1, 2)).sum().backward()
        optimizer.step()


def run_alone(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=job_environment(), timeout=120
    )


def test_one_process_needs_no_launcher():
    needs_torch()
    code = """
import torch, dad.torch as hvd
for call in (hvd.rank, hvd.size, lambda: hvd.allreduce(torch.ones(1)), hvd.mpi_threads_supported):
    try:
        call()
        raise SystemExit("worked without init()")
    except ValueError as error:
        assert "init" in str(error), error
assert isinstance(hvd.gloo_built(), bool) and hvd.cuda_built() is False
import tempfile
with tempfile.NamedTemporaryFile() as file:
    hvd.save(file.name, model=torch.nn.Linear(2, 1), epoch=3)
    assert hvd.load(file.name, model=torch.nn.Linear(2, 1)) == {"epoch": 3}
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_size()) == (0, 1, 1)
x = torch.arange(4.0)
assert hvd.allreduce(x).equal(x) and hvd.allgather(x).equal(x) and hvd.broadcast(x, 0).equal(x)
assert hvd.alltoall(x).equal(x) and hvd.reducescatter(x).equal(x) and hvd.join() == 0
assert hvd.alltoall(x, [4])[1].tolist() == [4]
hvd.barrier()
assert hvd.broadcast_object({"a": 1}) == {"a": 1} and hvd.allgather_object(3) == [3]
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
hvd.broadcast_parameters(model.state_dict(), 0)
hvd.broadcast_optimizer_state(optimizer, 0)
hvd.check_replicas(model)
hvd.SyncBatchNorm(2)(torch.ones(3, 2))
import time
start = time.perf_counter()
for _ in range(1000):
    hvd.synchronize(hvd.allreduce_async_(x, name="fast"))
print("us per call", (time.perf_counter() - start) * 1e3)
"""
    done = run_alone(code)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


def test_importing_dad_loads_no_framework():
    code = "import sys, dad; dad.Compression; dad.DadInternalError; assert 'torch' not in sys.modules"
    done = run_alone(code)
    assert done.returncode == 0, done.stderr
