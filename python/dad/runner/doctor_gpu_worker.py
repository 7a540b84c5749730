"""One rank of `dadrun --doctor --gpu`: tests dad on this rank's device.

    dadrun -np 2 python -m dad.runner.doctor_gpu_worker collectives

Stages are `collectives` (every collective against what its result must be), `exactness` (methods
against one process that has the whole batch) and `speed` (against torch.distributed with NCCL).
Rank 0 prints a line for each finding; the exit code is 1 if something is wrong. With `--device cpu`
the same is done on the host, against gloo: that is how this file is tested.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import dad
import dad.torch as hvd

_OK, _BROKEN = "✓", "✗"
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def main(arguments: list[str] | None = None) -> int:
    args = _arguments(arguments)
    hvd.init()
    try:
        if args.device == "cuda":
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        stage = {"collectives": _collectives, "exactness": _exactness, "speed": _speed}[args.stage]
        return stage(torch.device(args.device), args)
    finally:
        hvd.shutdown()


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dad.runner.doctor_gpu_worker")
    parser.add_argument("stage", choices=["collectives", "exactness", "speed"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--largest-mb", type=float, default=256.0, help="speed: the largest tensor")
    parser.add_argument("--steps", type=int, default=20, help="of training, and of each measurement")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def _worst(problem: str | None) -> str | None:
    """A finding of some rank, the same on all of them."""
    found = [(rank, text) for rank, text in enumerate(hvd.allgather_object(problem)) if text]
    return f"rank {found[0][0]}: {found[0][1]}" if found else None


# ---- Collectives.


def _collectives(device: torch.device, _: argparse.Namespace) -> int:
    wrong = 0
    for name, check in _checks(device):
        dad.reset_stats()
        try:
            problem = check()
        except Exception as error:  # an error is a finding, too, and the others wait for this rank
            problem = f"{type(error).__name__}: {error}"
        problem = _worst(problem)
        way = "from device to device" if dad.stats()["device_bytes"] else "by way of the host"
        wrong += problem is not None
        _say(f"{_OK} {name}: {way}" if problem is None else f"{_BROKEN} {name}: {problem}")
    return int(wrong > 0)


def _ramp(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Small whole numbers, which every type adds up exactly; another start on each rank."""
    return ((torch.arange(count, device=device) + rank) % 5 + 1).to(dtype)


def _checks(device: torch.device) -> Iterator[tuple[str, Callable[[], str | None]]]:
    rank, size = hvd.rank(), hvd.size()

    def ramps(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [_ramp(r, count, dtype, device) for r in range(size)]

    def reduced(op: Any, parts: list[torch.Tensor]) -> torch.Tensor:
        stack = torch.stack(parts).double()
        by = {hvd.Sum: stack.sum, hvd.Average: stack.mean, hvd.Product: stack.prod}
        if op in by:
            return by[op](0).to(parts[0].dtype)
        return (stack.amin(0) if op == hvd.Min else stack.amax(0)).to(parts[0].dtype)

    def sums(op: Any, dtypes: tuple[torch.dtype, ...]) -> str | None:
        for dtype in dtypes:
            for count in (1, 1000, 100_003):
                parts = ramps(count, dtype)
                got = hvd.allreduce(parts[rank], op=op, name=f"doctor.{op}.{dtype}.{count}")
                problem = _difference(got, reduced(op, parts), f"{count} of {dtype}", op == hvd.Average)
                if problem:
                    return problem
        return None

    floating = tuple(dtype for dtype in _DTYPES if dtype.is_floating_point)
    for label, op, dtypes in (
        ("Sum", hvd.Sum, _DTYPES),
        ("Average", hvd.Average, floating),
        ("Min", hvd.Min, _DTYPES),
        ("Max", hvd.Max, _DTYPES),
        ("Product", hvd.Product, (torch.float64, torch.int64)),
    ):
        yield f"allreduce, {label}", lambda op=op, dtypes=dtypes: sums(op, dtypes)

    def fused() -> str | None:
        counts = [1, 0, 77, 4096, 100_003] * 8
        for step in range(4):  # by the schedule from the second step on
            parts = [ramps(count, torch.float32) for count in counts]
            handles = [
                hvd.allreduce_async(part[rank], op=hvd.Sum, name=f"doctor.fused.{i}")
                for i, part in enumerate(parts)
            ]
            for handle, part in zip(handles, parts, strict=True):
                problem = _difference(hvd.synchronize(handle), reduced(hvd.Sum, part), f"step {step}")
                if problem:
                    return problem
        return None

    yield "40 tensors in one buffer", fused

    def scaled() -> str | None:
        parts = ramps(1000, torch.float32)
        got = hvd.allreduce(
            parts[rank], op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0, name="doctor.scaled"
        )
        return _difference(got, 2 * reduced(hvd.Sum, parts), "scaled by 0.5 and by 4")

    yield "scale factors", scaled

    def broadcast() -> str | None:
        got = hvd.broadcast(_ramp(rank, 1000, torch.float32, device), root_rank=size - 1, name="doctor.b")
        return _difference(got, _ramp(size - 1, 1000, torch.float32, device), "from the last rank")

    yield "broadcast", broadcast

    def allgather(equal: bool) -> str | None:
        parts = [_ramp(r, 6 if equal else 3 * r, torch.float32, device).view(-1, 3) for r in range(size)]
        got = hvd.allgather(parts[rank], name=f"doctor.g{equal}")
        return _difference(got, torch.cat(parts), "rows of all")

    yield "allgather of equal rows", lambda: allgather(True)
    yield "allgather of unequal rows", lambda: allgather(False)

    def alltoall() -> str | None:
        # Rank r sends p rows of value r to rank p.
        splits = torch.arange(size)
        mine = torch.full((int(splits.sum()), 2), float(rank), device=device)
        got, received = hvd.alltoall(mine, splits=splits, name="doctor.a")
        wanted = torch.arange(size, device=device).repeat_interleave(rank).float().view(-1, 1).expand(-1, 2)
        if received.tolist() != [rank] * size:
            return f"received splits {received.tolist()}"
        return _difference(got, wanted, "rows from each")

    yield "alltoall with splits", alltoall

    def reducescatter() -> str | None:
        parts = ramps(2 * size + 1, torch.float32)
        got = hvd.reducescatter(parts[rank], op=hvd.Sum, name="doctor.r")
        first = 2 * rank + min(rank, 1)
        wanted = reduced(hvd.Sum, parts)[first : first + (3 if rank == 0 else 2)]
        return _difference(got, wanted, "with a remainder")

    yield "reducescatter", reducescatter


def _difference(got: torch.Tensor, wanted: torch.Tensor, what: str, rounded: bool = False) -> str | None:
    if got.device != wanted.device or got.dtype != wanted.dtype or got.shape != wanted.shape:
        return (
            f"{what}: {got.dtype} {tuple(got.shape)} on {got.device}, "
            f"expected {wanted.dtype} {tuple(wanted.shape)} on {wanted.device}"
        )
    close = torch.isclose(got.double(), wanted.double(), rtol=1e-2 if rounded else 0.0, atol=0.0)
    if bool(close.all()):
        return None
    place = int((~close).flatten().nonzero()[0])
    return f"{what}: element {place} is {got.flatten()[place].item()}, not {wanted.flatten()[place].item()}"


# ---- Exactness.

_METHODS = ("none", "dad", "edad", "exact", "rank_dad", "int8", "vgc", "qsgd", "powersgd")
_EXACT = ("none", "dad", "edad", "exact")


def _exactness(device: torch.device, args: argparse.Namespace) -> int:
    wrong = 0
    reference = _train(device, args.steps, None)
    for method in _METHODS:
        try:
            weights = _train(device, args.steps, method)
            problem = _far(weights, reference, 1e-3 if method in _EXACT else 0.5)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problem = _worst(problem)
        wrong += problem is not None
        what = "as one process with the whole batch" if method in _EXACT else "near it, replicas bit-equal"
        _say(f"{_OK} {method}: {what}" if problem is None else f"{_BROKEN} {method}: {problem}")
    return int(wrong > 0)


def _train(device: torch.device, steps: int, method: str | None) -> torch.Tensor:
    """The weights after training on all ranks' batches. Without a method, each rank trains on all batches
    alone."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 128), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 10)).to(device)
    inputs = torch.randn(steps, hvd.size(), 8, 64, device=device)
    targets = torch.randint(10, (steps, hvd.size(), 8), device=device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if method is not None:
        compression = getattr(hvd.Compression, method)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        batch = (x.flatten(0, 1), y.flatten()) if method is None else (x[hvd.rank()], y[hvd.rank()])
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    if method is not None:
        dad.check_replicas(model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _far(weights: torch.Tensor, reference: torch.Tensor, tolerance: float) -> str | None:
    off = float((weights - reference).norm() / reference.norm())
    return None if off <= tolerance else f"its weights are off by {off:.3g} of their norm"


# ---- Speed.


def _speed(device: torch.device, args: argparse.Namespace) -> int:
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=_meeting_place(), rank=hvd.rank(), world_size=hvd.size())
    try:
        _say(f"{'':24}{'dad':>12}{backend:>12}   dad is")
        for label, num_bytes, ours, theirs in _measurements(device, args.largest_mb, dist):
            mine, other = _milliseconds(ours, device, args.steps), _milliseconds(theirs, device, args.steps)
            ratio = f"{other / mine:.2f}x as fast"
            bus = 2 * (hvd.size() - 1) / hvd.size() * num_bytes / mine / 1e6
            _say(f"{label:24}{mine:9.3f} ms{other:9.3f} ms   {ratio} ({bus:.1f} GB/s on the bus)")
    finally:
        dist.destroy_process_group()
    return 0


def _meeting_place() -> str:
    """Where the ranks of torch.distributed meet: a free port of rank 0's host."""
    address = None
    if hvd.rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            host = "127.0.0.1" if hvd.local_size() == hvd.size() else socket.gethostname()
            address = f"tcp://{host}:{probe.getsockname()[1]}"
    return hvd.broadcast_object(address, root_rank=0)


def _measurements(
    device: torch.device, largest_mb: float, dist: Any
) -> Iterator[tuple[str, int, Callable[[], Any], Callable[[], Any]]]:
    megabytes = 0.004
    while megabytes <= largest_mb:
        elements = int(megabytes * 1e6 / 4)
        tensor = torch.ones(elements, device=device)
        name = f"doctor.speed.{elements}"
        yield (
            f"allreduce {megabytes:g} MB",
            4 * elements,
            lambda t=tensor, n=name: hvd.allreduce_(t, op=hvd.Sum, name=n),
            lambda t=tensor: dist.all_reduce(t),
        )
        megabytes *= 8
    many = [torch.ones(int(largest_mb * 1e6 / 4 / 100), device=device) for _ in range(100)]

    def ours() -> None:
        handles = [hvd.allreduce_async_(t, op=hvd.Sum, name=f"doctor.many.{i}") for i, t in enumerate(many)]
        for handle in handles:
            hvd.synchronize(handle)

    def theirs() -> None:
        for work in [dist.all_reduce(t, async_op=True) for t in many]:
            work.wait()

    yield f"100 of {largest_mb / 100:g} MB", 400 * many[0].numel(), ours, theirs


def _milliseconds(work: Callable[[], Any], device: torch.device, times: int) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        hvd.barrier()

    for _ in range(3):
        work()
    wait()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return 1e3 * (time.perf_counter() - begin) / times


if __name__ == "__main__":
    sys.exit(main())
