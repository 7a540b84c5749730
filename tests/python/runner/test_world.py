"""How a process finds its place, under every launcher."""

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import dad
from dad.runner import meeting, network
from dad.runner.kv import KeyValueClient
from dad.runner.meeting import meet, place_among
from dad.runner.rendezvous import RendezvousServer
from dad.variables import misspelt
from dad.world import Meeting, World, WorldError, discover, first_host
from util import free_ports

PACKAGE_ROOT = str(Path(dad.__file__).parents[1])
SHOW_WORLD = """
import json, os, time
from dad.world import open_world
open_world()
os.write(1, (json.dumps(open_world(), default=bytes.decode) + "\\n").encode())  # in one piece: ranks share the pipe
time.sleep(0.5)  # as in a job, where init() ends on all ranks together
"""
FAMILY = {
    "RANK": "3",
    "SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "HOSTNAME": "b",
}
HOROVOD = {f"HOROVOD_{name}": value for name, value in FAMILY.items()} | {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
    "HOROVOD_CPU_OPERATIONS": "gloo",
}
DAD = {f"DAD_{name}": value for name, value in FAMILY.items()} | {"DAD_RENDEZVOUS": "http://10.0.0.2:99"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def clean_environment(**more):
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "DAD_START_TIMEOUT": "20"} | more


def run_ranks(environments):
    """The worlds of processes with these variables, by rank."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHOW_WORLD], env=clean_environment(**variables), stdout=subprocess.PIPE
        )
        for variables in environments
    ]
    outputs = [process.communicate(timeout=40)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(output) for output in outputs]


# ---- reading the variables


def test_alone_without_variables():
    world = discover({})
    assert (world.rank, world.size, world.local_size, world.cross_size) == (0, 1, 1, 1)
    assert (world.rendezvous, world.launcher, world.transport) == ("", "none", "gloo")


@pytest.mark.parametrize(
    ("variables", "url"), [(DAD, "http://10.0.0.2:99"), (HOROVOD, "http://10.0.0.1:1234")]
)
def test_dadrun_and_horovodrun(variables, url):
    world = discover(variables)
    place = (world.rank, world.size, world.local_rank, world.local_size, world.cross_rank, world.cross_size)
    assert place == (3, 4, 1, 2, 1, 2)
    assert (world.rendezvous, world.hostname, world.transport) == (url, "b", "gloo")


def test_order_of_the_launchers():
    everything = SLURM | TORCHRUN | OPENMPI | HOROVOD | DAD
    for family, launcher in (
        (DAD, "dadrun"),
        (HOROVOD, "horovodrun"),
        (OPENMPI, "mpi"),
        (TORCHRUN, "torchrun"),
    ):
        assert discover(everything).launcher == launcher
        everything = {name: value for name, value in everything.items() if name not in family}
    assert discover(everything).launcher == "slurm"


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        (DAD, "DAD_SIZE"),
        (DAD, "DAD_RENDEZVOUS"),
        (HOROVOD, "HOROVOD_RANK"),
        (HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        (HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        (OPENMPI, "OMPI_COMM_WORLD_SIZE"),
        (TORCHRUN, "MASTER_ADDR"),
        (TORCHRUN, "MASTER_PORT"),
        (TORCHRUN, "WORLD_SIZE"),
        (SLURM, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_missing_variable_is_named(variables, missing):
    partial = {k: v for k, v in variables.items() if k not in (missing, "SLURM_NTASKS")}
    with pytest.raises(WorldError, match=missing):
        discover(partial)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"DAD_RANK": "four"}, "DAD_RANK=four"),
        ({"DAD_RANK": "-1"}, "DAD_RANK=-1"),
        ({"DAD_RANK": "4"}, "rank 4 of 4"),
        ({"DAD_LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({"DAD_LOCAL_SIZE": "5"}, "5 ranks on this host"),
        ({"DAD_RENDEZVOUS": "10.0.0.2:99"}, "DAD_RENDEZVOUS=10.0.0.2:99"),
        ({"DAD_START_TIMEOUT": "soon"}, "DAD_START_TIMEOUT=soon"),
    ],
)
def test_impossible_value_is_named(change, message):
    with pytest.raises(WorldError, match=message):
        discover(DAD | change)


def test_elastic_worker_keeps_its_slot_when_lower_ones_are_lost():
    world = discover(DAD | {"DAD_ELASTIC": "1", "DAD_LOCAL_RANK": "1", "DAD_LOCAL_SIZE": "1"})
    assert (world.local_rank, world.local_size) == (1, 1)


def test_mpich_variables():
    world = discover({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 2, 1, 2)
    assert (world.launcher, world.transport, world.meeting.how) == ("mpi", "mpi", "mpi")


def test_ranks_of_mpich_in_a_slurm_job_are_not_taken_for_the_proxy_that_srun_started():
    proxy = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
    rank = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
    world = discover(proxy | rank | {"ENVIRONMENT": "BATCH"})
    assert (world.launcher, world.rank, world.size) == ("mpi", 2, 4)
    assert (world.local_rank, world.local_size) == (2, 3)


def test_sruns_own_pmi_variables_do_not_make_it_mpi():
    assert discover(SLURM | {"PMI_RANK": "1", "PMI_SIZE": "2"}).launcher == "slurm"


def test_sbatch_script_is_one_process():
    assert discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH"}).size == 1
    assert discover(SLURM | {"SLURM_STEP_ID": "4294967291"}).size == 1


def test_rank_alone_is_not_torchrun():
    assert discover({"RANK": "3"}).launcher == "none"


def test_master_port_is_left_to_torch_distributed():
    ports = discover(TORCHRUN).meeting.ports
    assert ports[0] == 29501
    assert ports[-1] == 29500


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-07,9],x", "gpu03"), ("a[1,3]-ib", "a1-ib"), ("n-[2]", "n-2")],
)
def test_first_host_of_a_slurm_node_list(nodes, first):
    assert first_host(nodes) == first


def test_places_on_unequal_hosts():
    seats = [{"host": host, "local_rank": None} for host in "aabab"]
    worlds = [place_among(World(rank=rank, size=5), seats) for rank in range(5)]
    assert [world.local_rank for world in worlds] == [0, 1, 0, 2, 1]
    assert [world.local_size for world in worlds] == [3, 3, 2, 3, 2]
    assert [world.cross_rank for world in worlds] == [0, 0, 1, 0, 1]
    assert [world.cross_size for world in worlds] == [2, 2, 2, 1, 2]


def test_two_ranks_with_the_same_local_rank_on_a_host_are_an_error():
    seats = [{"host": "a", "local_rank": 0}] * 2
    with pytest.raises(WorldError, match="DAD_HOSTNAME"):
        place_among(World(rank=1, size=2), seats)


# ---- meeting


def torch_environments(size, port, **more):
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), **more}
    return [{"RANK": str(rank), **common} for rank in range(size)]


def check_local_worlds(worlds):
    size = len(worlds)
    assert [world["rank"] for world in worlds] == list(range(size))
    assert [world["local_rank"] for world in worlds] == list(range(size))
    assert {world["local_size"] for world in worlds} == {size}
    assert {world["cross_size"] for world in worlds} == {1}
    assert len({world["rendezvous"] for world in worlds}) == 1
    assert {world["generation"] for world in worlds} == {"2"}


def test_plain_torch_variables():
    check_local_worlds(run_ranks(torch_environments(3, free_ports(2))))


def test_ports_that_are_taken_are_passed_over():
    # One by another job of ours, one by a server that never answers.
    port = free_ports(4)
    with RendezvousServer("", port + 1, "another job"), socket.socket() as silent:
        silent.bind(("", port + 2))
        silent.listen()
        worlds = run_ranks(torch_environments(2, port))
        check_local_worlds(worlds)
        assert worlds[0]["rendezvous"].endswith(f":{port + 3}")


def test_server_of_an_earlier_run_is_not_taken_for_ours():
    port = free_ports(2)
    token = discover(torch_environments(2, port)[0]).meeting.token
    with RendezvousServer("127.0.0.1", port + 1, token) as stale:
        stale.put("dad_seats", "0", b"{}")
        stale.put("dad_seats", "1", b"{}")
        check_local_worlds(run_ranks(torch_environments(2, port)))


@pytest.mark.parametrize(("host", "other"), [("localhost", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
def test_rank_0_serves_only_where_the_others_look_for_it(host, other):
    place = Meeting("ports", host, (free_ports(2),), "this job")
    worlds = [World(rank, 2, None, None, None, None, meeting=place) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(meet, worlds))
    assert {world.local_size for world in met} == {2}
    port = urlsplit(met[1].rendezvous).port
    socket.create_connection((host, port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, port), timeout=5)


def test_rank_0_whose_name_is_a_loopback_address_serves_only_where_ranks_have_come(monkeypatch):
    monkeypatch.setattr(network, "serving_address", lambda host: "")
    place = Meeting("ports", "127.0.0.2", (free_ports(2),), "this job")
    worlds = [World(rank, 2, None, None, None, None, meeting=place) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(meet, worlds))
    port = urlsplit(met[1].rendezvous).port
    assert KeyValueClient(f"http://127.0.0.2:{port}").is_server_of("this job")
    assert not KeyValueClient(f"http://127.0.0.3:{port}").is_server_of("this job")


def test_rank_0_of_mpirun_goes_on_serving_only_where_the_others_have_found_it(monkeypatch):
    told = Future()

    def bootstrap(message):  # rank 0's message, on every rank
        if message:
            told.set_result(message)
        return told.result(timeout=10)

    monkeypatch.setattr(meeting, "_mpi_bootstrap", lambda: bootstrap)
    monkeypatch.setattr(meeting, "_own_addresses", lambda world: ["127.0.0.2", "127.0.0.3"])
    worlds = [World(rank, 2, None, None, None, None, meeting=Meeting("mpi")) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(meet, worlds))
    token, first, second = told.result().split()
    assert {world.rendezvous for world in met} == {first}
    assert KeyValueClient(first).is_server_of(token)
    assert not KeyValueClient(second).is_server_of(token)


def test_address_to_serve_on(monkeypatch):
    names = {
        "node": ["10.0.0.9"],
        "own": ["127.0.1.1"],
        "service": ["10.9.9.9"],
        "two": ["10.9.9.9", "10.0.0.9"],
    }
    monkeypatch.setattr(network, "addresses_of", lambda host: names.get(host, []))
    monkeypatch.setattr(network, "is_local", lambda address: address.startswith(("127.", "10.0.")))
    monkeypatch.setattr(network, "address_towards", lambda host: f"on the way to {host}")
    assert network.serving_address("node") == network.serving_address("two") == "10.0.0.9"
    assert network.serving_address("service") == "on the way to service"
    # Others know this machine under another address, which its own name does not tell.
    assert network.serving_address("own") == network.serving_address("unknown") == ""


def test_ranks_that_are_awaited_are_named(monkeypatch, capsys):
    monkeypatch.setattr(meeting, "_PATIENCE_SECONDS", 0.1)
    place = World(1, 5, None, None, None, None, start_timeout=0.5, meeting=Meeting("url"))
    with RendezvousServer("127.0.0.1") as server:
        server.put("dad_seats", "3", b"{}")
        with pytest.raises(WorldError, match="rank 0 has not arrived"):
            meet(replace(place, rendezvous=f"http://127.0.0.1:{server.port}"))
    assert (
        "[dad rank 1] still waiting for ranks 0, 2, 4 of 5 to call init(); giving up in"
        in capsys.readouterr().err
    )


def test_ranks_that_dadrun_has_placed_are_awaited_and_named_once(tmp_path):
    """The core waits for them, and only the first of those that have come says so."""
    place = {"DAD_SIZE": "4", "DAD_LOCAL_SIZE": "4", "DAD_CROSS_RANK": "0", "DAD_CROSS_SIZE": "1"}
    place |= {"DAD_RENDEZVOUS": f"file://{tmp_path}", "DAD_START_TIMEOUT": "7"}
    waiting = [
        subprocess.Popen(
            [sys.executable, "-c", "from dad import basics; basics.init()"],
            env=clean_environment(**place | {"DAD_RANK": rank, "DAD_LOCAL_RANK": rank}),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("1", "2")
    ]
    said = [process.communicate(timeout=60)[1] for process in waiting]
    assert "still waiting for ranks 0, 3 of 4 to call init(); giving up in " in said[0]
    assert "still waiting" not in said[1]


def test_variable_that_is_misspelt_is_named():
    assert misspelt(
        ["DAD_COMPRESION", "DAD_THREAD_PER_RANK", "DAD_PLAN", "DAD_TEST_HOSTS", "DAD_RANK", "HOME"]
    ) == [
        "DAD_COMPRESION is not a variable of dad (did you mean DAD_COMPRESSION?)",
        "DAD_THREAD_PER_RANK is not a variable of dad (did you mean DAD_THREADS_PER_RANK?)",
    ]
    environment = clean_environment(DAD_FUSION_BYTE="1")
    done = subprocess.run([sys.executable, "-c", SHOW_WORLD], env=environment, capture_output=True, text=True)
    assert done.stderr.count("DAD_FUSION_BYTE is not a variable of dad (did you mean DAD_FUSION_BYTES?)") == 1


def test_port_that_cannot_be_is_named():
    for port in ("0", "65536"):
        with pytest.raises(WorldError, match=f"MASTER_PORT={port}: expected a port from 1 to 65535"):
            discover(TORCHRUN | {"MASTER_PORT": port})


def test_slurm_variables():
    common = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    common["SLURM_STEP_NODELIST"] = "localhost"
    check_local_worlds(run_ranks([{"SLURM_PROCID": str(rank), **common} for rank in range(2)]))


def test_named_hosts_and_agents_tell_ranks_apart():
    environments = torch_environments(4, free_ports(2), LOCAL_WORLD_SIZE="1")
    for rank, variables in enumerate(environments):
        variables["LOCAL_RANK"] = "0"
        variables["GROUP_RANK" if rank < 2 else "DAD_HOSTNAME"] = f"{rank}"
    worlds = run_ranks(environments)
    assert [world["cross_rank"] for world in worlds] == [0, 1, 2, 3]
    assert {(world["local_size"], world["cross_size"]) for world in worlds} == {(1, 4)}


def test_shared_directory(tmp_path):
    common = {"DAD_SIZE": "2", "DAD_RENDEZVOUS": f"file://{tmp_path}/meet"}
    check_local_worlds(run_ranks([{"DAD_RANK": str(rank), **common} for rank in range(2)]))


def test_rank_that_does_not_come_is_an_error_that_says_so():
    environment = clean_environment(**torch_environments(2, free_ports(2), DAD_START_TIMEOUT="1")[0])
    done = subprocess.run([sys.executable, "-c", SHOW_WORLD], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "rank 1 has not arrived" in done.stderr
    assert "DAD_START_TIMEOUT" in done.stderr


def test_torchrun_with_its_agents_store(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "show.py"
    script.write_text(SHOW_WORLD)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    worlds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    check_local_worlds(sorted(worlds, key=lambda world: world["rank"]))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here (apt-get install openmpi-bin)")
def test_mpirun_with_a_given_rendezvous():
    with RendezvousServer("127.0.0.1") as server:
        environment = clean_environment(DAD_RENDEZVOUS=f"http://127.0.0.1:{server.port}")
        command = ["mpirun", "-np", "2", "--host", "localhost:2", sys.executable, "-c", SHOW_WORLD]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    worlds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    check_local_worlds(sorted(worlds, key=lambda world: world["rank"]))
    assert {world["transport"] for world in worlds} == {"mpi"}


def test_forked_child_starts_over():
    code = """
import os
from dad.world import open_world
open_world()
if os.fork() == 0:
    assert open_world()["generation"] == "1"
    os._exit(5)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 5
assert open_world()["generation"] == "2"
"""
    subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=True, timeout=30)
