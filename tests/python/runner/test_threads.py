"""The threads of a rank: its share of the cores that the ranks of a host may use."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dad
from dad import threads
from dad.runner.child import cgroup_directories, cpu_quota, share_cores, share_of_cores, usable_cores
from dad.world import World

PACKAGE_ROOT = str(Path(dad.__file__).parents[1])
DADRUN = [sys.executable, "-m", "dad.runner.cli"]


# ---- counting


def make_tree(root, membership, files):
    for name, text in {"proc/self/cgroup": membership, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        # The tightest of the groups above counts.
        (
            "0::/pod/box\n",
            {"sys/fs/cgroup/pod/cpu.max": "200000 100000", "sys/fs/cgroup/pod/box/cpu.max": "400000 100000"},
            2.0,
        ),
        # Version 1; in a container the path may be one of the host.
        (
            "4:memory:/x\n3:cpu,cpuacct:/docker/17\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            "3:cpu:/job\n0::/\n",
            {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "rubbish"}, None),
    ],
)
def test_quota_of_the_cgroup(tmp_path, membership, files, quota):
    make_tree(tmp_path, membership, files)
    cores = usable_cores(str(tmp_path))
    assert cores["quota"] == quota
    assert cores["cpus"] == sorted(os.sched_getaffinity(0))
    assert (cores["quota_group"] == "") == (quota is None)


def test_without_cgroups_there_is_no_quota(tmp_path):
    assert list(cgroup_directories(str(tmp_path))) == []
    assert cpu_quota(str(tmp_path)) is None


def cores(cpus, quota=None, group=""):
    return {"cpus": list(cpus), "quota": quota, "quota_group": group}


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [
        ([cores(range(8))] * 2, [4, 4]),
        ([cores(range(8))] * 3, [2, 2, 2]),
        ([cores(range(2))] * 4, [1, 1, 1, 1]),
        # Pinned, as by mpirun --bind-to core or srun --cpu-bind: the share is what it is pinned to.
        ([cores([0]), cores([1])], [1, 1]),
        ([cores([0, 1, 2]), cores([3, 4, 5])], [3, 3]),
        # Two on each socket.
        ([cores(range(4)), cores(range(4)), cores(range(4, 8)), cores(range(4, 8))], [2, 2, 2, 2]),
        # One of two is pinned: the other has the rest and half of that.
        ([cores(range(8)), cores([0, 1])], [7, 1]),
        # A quota of both together, and one for each.
        ([cores(range(64), 4.0, "/pod")] * 2, [2, 2]),
        ([cores(range(64), 4.0, "/a"), cores(range(64), 6.0, "/b")], [4, 6]),
        ([cores(range(64), 0.5, "/pod")], [1]),
    ],
)
def test_ranks_of_a_host_divide_its_cores(ranks, shares):
    assert [share_of_cores(rank, ranks) for rank in ranks] == shares


# ---- dadrun: variables


def shared(num_cpus=8, **environment):
    share_cores(environment, cores(range(num_cpus)))
    return environment


def test_dadrun_sets_what_the_user_has_not_set():
    assert shared(DAD_LOCAL_SIZE="2") == {
        "DAD_LOCAL_SIZE": "2",
        "OMP_NUM_THREADS": "4",
        "TF_NUM_INTRAOP_THREADS": "4",
        "DAD_THREADS": "4",
        "DAD_CORE_SHARE": '{"threads": 4, "for": ["torch", "TensorFlow", "dad"]}',
    }
    for name, others in {
        "OMP_NUM_THREADS": ["TensorFlow", "dad"],
        "MKL_NUM_THREADS": ["TensorFlow", "dad"],
        "TF_NUM_INTRAOP_THREADS": ["torch", "dad"],
        "DAD_THREADS": ["torch", "TensorFlow"],
    }.items():
        seen = shared(DAD_LOCAL_SIZE="2", **{name: "7"})
        assert seen[name] == "7"
        assert json.loads(seen["DAD_CORE_SHARE"])["for"] == others


def test_wish_replaces_what_is_set():
    seen = shared(DAD_LOCAL_SIZE="2", OMP_NUM_THREADS="7", DAD_THREADS_PER_RANK="3")
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "DAD_THREADS")
    assert [seen[name] for name in names] == ["3"] * 4


def test_rank_that_has_the_host_to_itself_and_other_commands_are_left_alone():
    for environment in ({"DAD_LOCAL_SIZE": "1"}, {}):
        assert shared(**environment) == environment


# ---- other launchers: calls


class FakeTorch:
    def __init__(self, num_threads=8):
        self.num_threads = num_threads
        self.get_num_threads = lambda: self.num_threads

    def set_num_threads(self, number):
        self.num_threads = number


class FakeTensorFlow:
    def __init__(self, num_threads=0, started=False):
        self.num_threads = num_threads
        self.started = started
        self.config = SimpleNamespace(threading=self)

    def get_intra_op_parallelism_threads(self):
        return self.num_threads

    def set_intra_op_parallelism_threads(self, number):
        if self.started:
            raise RuntimeError("cannot be modified after initialization")
        self.num_threads = number


@pytest.fixture
def choose(monkeypatch, capsys):
    """What choose() makes of libraries and variables on 8 cores, and what rank 0 says."""
    monkeypatch.setattr(threads, "usable_cores", lambda: cores(range(8)))
    monkeypatch.setattr(threads, "_count_physical_cores", lambda: 8)
    monkeypatch.setattr(threads, "_said", False)

    def run(torch=None, tensorflow=None, size=4, local_size=4, **environment):
        for name, module in (("torch", torch), ("tensorflow", tensorflow)):
            monkeypatch.setitem(sys.modules, name, module)
        world = World(rank=0, size=size, local_rank=0, local_size=local_size)
        chosen = threads.choose(world, environment)
        numbers = [module.num_threads for module in (torch, tensorflow) if module is not None]
        return chosen, numbers, capsys.readouterr().err

    return run


def test_init_tells_the_libraries_and_the_user(choose):
    chosen, numbers, said = choose(FakeTorch(), FakeTensorFlow())
    assert (chosen, numbers) == (2, [2, 2])
    assert said == (
        "[dad rank 0] torch and TensorFlow use 2 threads in each rank, its share of the host's cores "
        "(dadrun --threads-per-rank N or DAD_THREADS_PER_RANK=N changes it)\n"
    )
    assert choose(FakeTorch())[2] == ""  # once is enough


def test_init_keeps_what_the_user_has_set(choose):
    # Calls before init(), and variables; torchrun sets OMP_NUM_THREADS=1.
    assert choose(FakeTorch(5), FakeTensorFlow(6)) == (2, [5, 6], "")
    assert choose(FakeTorch(), OMP_NUM_THREADS="8") == (2, [8], "")
    assert choose(FakeTorch(), MKL_NUM_THREADS="8") == (2, [8], "")
    assert choose(None, FakeTensorFlow(), TF_NUM_INTRAOP_THREADS="8") == (2, [0], "")


def test_wish_beats_calls_and_variables(choose):
    assert choose(FakeTorch(1), FakeTensorFlow(1), OMP_NUM_THREADS="1", DAD_THREADS_PER_RANK="3") == (
        3,
        [3, 3],
        "",
    )
    with pytest.raises(ValueError, match="DAD_THREADS_PER_RANK=0: expected a whole number of at least 1"):
        choose(DAD_THREADS_PER_RANK="0")


def test_call_in_the_script_beats_what_dadrun_has_set(choose):
    share = {"DAD_CORE_SHARE": '{"threads": 2, "for": ["torch", "TensorFlow", "dad"]}'}
    assert choose(FakeTorch(8), FakeTensorFlow(5), **share) == (2, [8, 5], "")
    chosen, numbers, said = choose(FakeTorch(2), FakeTensorFlow(), **share)
    assert (chosen, numbers) == (2, [2, 2])
    assert said.startswith("[dad rank 0] torch and TensorFlow use 2 threads in each rank")


def test_tensorflow_that_has_started_is_left_as_it_is_and_said(choose):
    chosen, numbers, said = choose(None, FakeTensorFlow(started=True))
    assert (chosen, numbers) == (2, [0])
    assert "call init() before the first operation, or set TF_NUM_INTRAOP_THREADS" in said


def test_process_that_is_alone_keeps_its_threads(choose):
    assert choose(FakeTorch(), size=1, local_size=1)[1:] == ([8], "")


# ---- real jobs


def run_job(script, *flags, without=(), **variables):
    environment = {name: value for name, value in os.environ.items() if name not in without}
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    command = [*DADRUN, "-np", "2", *flags, sys.executable, "-c", script]
    done = subprocess.run(
        command,
        env=environment | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines()), done.stderr


def test_dadrun_divides_the_cores_between_the_ranks():
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    script = (
        "import torch, tensorflow as tf, dad.torch as hvd\n"
        "hvd.init()\n"
        "print(torch.get_num_threads(), tf.config.threading.get_intra_op_parallelism_threads())\n"
    )
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    lines, said = run_job(script, without=["OMP_NUM_THREADS"])
    assert lines == [f"[{rank}]<stdout>:{share} {share}" for rank in (0, 1)]
    assert said.count("in each rank, its share of the host's cores (dadrun --threads-per-rank N") == 1


def test_dadrun_leaves_what_the_user_has_set():
    script = "import torch, dad.torch as hvd; hvd.init(); print(torch.get_num_threads())"
    pytest.importorskip("torch")
    # As many as there are cores, which is not the share.
    number = str(len(os.sched_getaffinity(0)))
    lines, said = run_job(script, OMP_NUM_THREADS=number)
    assert lines == [f"[{rank}]<stdout>:{number}" for rank in (0, 1)]
    assert "threads" not in said
