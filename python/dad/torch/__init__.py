"""dad for PyTorch: `import dad.torch as hvd`."""
# ruff: noqa: F401  this file only collects names

from dad.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    reset_stats,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
)
from dad.errors import (
    CheckpointError,
    DadInternalError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    ReplicaError,
)
from dad.local_steps.outer import Outer
from dad.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from dad.torch.batch_norm import average_batch_norm
from dad.torch.checkpoint import load, merge_states, save
from dad.torch.compression import Compression
from dad.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from dad.torch.handles import poll, synchronize
from dad.torch.move_ops import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from dad.torch.ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from dad.torch.optimizer import DistributedOptimizer
from dad.torch.replicas import check_replicas
from dad.torch.sync_batch_norm import SyncBatchNorm

from dad.torch import elastic, mpi_ops  # isort: skip  mpi_ops takes the names above
