"""What dadrun makes of its flags: hosts, variables, mpirun's command. Starts nothing."""

import os
import socket

import pytest

from dad.runner import network
from dad.runner.cli import main
from dad.runner.elastic.options import elastic_plan
from dad.runner.errors import LaunchError
from dad.runner.flags import make_parser
from dad.runner.hosts import Host, assign_ranks, parse_hostfile, parse_hosts
from dad.runner.launch import LaunchPlan, Network, start_server
from dad.runner.mpi import MpiJob, mpi_environment, mpich_command, openmpi_command
from dad.runner.remote import exportable
from dad.runner.settings import read_config_file, variables_from
from dad.runner.ssh import SshOptions

# ---- hosts


def test_hosts_are_parsed():
    assert parse_hosts("a:2, b:4,c") == [Host("a", 2), Host("b", 4), Host("c", 1)]


@pytest.mark.parametrize("text", ["", "a:0", "a:x", "a:1,a:2", ":3", "a b"])
def test_bad_hosts_are_refused(text):
    with pytest.raises(LaunchError):
        parse_hosts(text)


def test_hostfile(tmp_path):
    (tmp_path / "hosts").write_text("# mine\na slots=2\n\nb:3  # fast\nc\nd\tslots=4\n")
    assert parse_hostfile(str(tmp_path / "hosts")) == [Host("a", 2), Host("b", 3), Host("c", 1), Host("d", 4)]
    (tmp_path / "hosts").write_text("a slots=2\nb slots=many\n")
    with pytest.raises(LaunchError, match="line 2"):
        parse_hostfile(str(tmp_path / "hosts"))


def test_ranks_fill_hosts_in_order():
    slots = assign_ranks([Host("a", 3), Host("b", 2)], None)
    assert [(s.host, s.local_rank, s.local_size) for s in slots] == [
        ("a", 0, 3),
        ("a", 1, 3),
        ("a", 2, 3),
        ("b", 0, 2),
        ("b", 1, 2),
    ]
    assert [(s.cross_rank, s.cross_size) for s in slots] == [(0, 2), (0, 2), (0, 1), (1, 2), (1, 2)]


def test_fewer_processes_than_slots_starts_exactly_that_many():
    assert [s.host for s in assign_ranks([Host("a", 2), Host("b", 2)], 3)] == ["a", "a", "b"]


def test_more_processes_than_slots_says_what_to_do():
    with pytest.raises(LaunchError, match="a:5.*-np 2"):
        assign_ranks([Host("a", 2)], 5)


# ---- flags and the environment


def parse(*args):
    return make_parser().parse_args([*args, "python", "train.py", "--verbose"])


def test_flags_become_variables_of_both_names():
    args = parse(
        *(
            "--fusion-threshold-mb",
            "32",
            "--cycle-time-ms",
            "2.5",
            "--cache-capacity",
            "9",
            "--no-stall-check",
        ),
        *("--timeline-filename", "t.json", "--log-level", "debug", "--log-without-timestamp", "--autotune"),
        *("--gloo-timeout-seconds", "7", "--start-timeout", "11", "--no-hierarchical-allreduce", "--tcp"),
        *("--compression", "rank_dad:rank=4", "--report", "r.json", "--plan", "--threads-per-rank", "3"),
        *("--local-steps", "5s", "--outer", "lr=0.5", "--fragments", "2", "--delay", "1"),
    )
    assert args.command == ["python", "train.py", "--verbose"]
    assert not args.verbose
    assert variables_from(args) == {
        "DAD_FUSION_BYTES": "33554432",
        "HOROVOD_FUSION_THRESHOLD": "33554432",
        "DAD_CYCLE_TIME_MS": "2.5",
        "HOROVOD_CYCLE_TIME": "2.5",
        "DAD_CACHE_CAPACITY": "9",
        "HOROVOD_CACHE_CAPACITY": "9",
        "DAD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "DAD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE": "t.json",
        "DAD_LOG_LEVEL": "DEBUG",
        "HOROVOD_LOG_LEVEL": "DEBUG",
        "DAD_LOG_HIDE_TIME": "1",
        "HOROVOD_LOG_HIDE_TIME": "1",
        "DAD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE": "1",
        "DAD_TIMEOUT_SECONDS": "7",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "7",
        "DAD_START_TIMEOUT": "11.0",
        "HOROVOD_START_TIMEOUT": "11.0",
        "DAD_HIERARCHICAL_ALLREDUCE": "0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
        "NCCL_IB_DISABLE": "1",
        "DAD_COMPRESSION": "rank_dad:rank=4",
        "DAD_LOCAL_STEPS": "5s",
        "DAD_OUTER": "lr=0.5",
        "DAD_FRAGMENTS": "2",
        "DAD_DELAY": "1",
        "DAD_REPORT": "r.json",
        "DAD_PLAN": "1",
        "DAD_THREADS_PER_RANK": "3",
    }


def test_no_flags_set_nothing():
    assert variables_from(parse()) == {}


@pytest.mark.parametrize(
    "flags",
    [
        "-np 2 -H a:1,b:1 -p 22 -i key --network-interfaces eth0,eth1 --disable-cache --verbose",
        "--num-proc 2 -hostfile hosts --network-interface a --network-interface b -prefix-timestamp",
        "--gloo --mpi-threads-disable --num-nccl-streams 1 --thread-affinity 0 --binding-args=-bind-to",
        "--mpi --mpi-args=-x --log-hide-timestamp --torus-allreduce --hierarchical-allgather",
        "--autotune-log-file f --autotune-warmup-samples 1 --autotune-steps-per-sample 1 --no-autotune",
        "--autotune-bayes-opt-max-samples 1 --autotune-gaussian-process-noise 0.1 --timeline-mark-cycles",
        "--stall-check-warning-time-seconds 1 --stall-check-shutdown-time-seconds 2 --stall-check",
        "--min-np 1 --max-np 2 --slots-per-host 1 --slots 1 --elastic-timeout 1 --reset-limit 1",
        "--host-discovery-script s --blacklist-cooldown-range 1 2 --min-num-proc 1 --max-num-proc 2",
        "-cb",
        "-v",
    ],
)
def test_flags_of_horovodrun_are_accepted(flags):
    assert parse(*flags.split()).command == ["python", "train.py", "--verbose"]


def test_config_file_fills_what_no_flag_has_set(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "controller: mpi\n"
        "params: {fusion_threshold_mb: 8, cycle_time_ms: 3, threads_per_rank: 2}\n"
        "autotune: {enabled: true, log_file: a.csv}\n"
        "timeline: {filename: t.json, mark_cycles: true}\n"
        "stall_check: {enabled: false, warning_time_seconds: 5}\n"
        "library_options: {gloo_timeout_seconds: 12}\n"
        "logging: {level: INFO, with_timestamp: false}\n"
    )
    args = parse("--config-file", str(config), "--cycle-time-ms", "1")
    read_config_file(args)
    variables = variables_from(args)
    assert args.controller == "mpi"
    assert variables["DAD_CYCLE_TIME_MS"] == "1"
    assert variables["DAD_FUSION_BYTES"] == str(8 << 20)
    assert variables["DAD_THREADS_PER_RANK"] == "2"
    assert variables["DAD_AUTOTUNE_LOG"] == "a.csv"
    assert variables["HOROVOD_TIMELINE_MARK_CYCLES"] == "1"
    assert variables["DAD_STALL_CHECK_DISABLE"] == "1"
    assert variables["DAD_TIMEOUT_SECONDS"] == "12"
    assert variables["HOROVOD_LOG_HIDE_TIME"] == "1"


@pytest.mark.parametrize(
    "text",
    [
        *("parms: {a: 1}", "params: {fusion: 1}", "controller: tcp", "[", "3"),
        *("params: 5", "params: {fusion_threshold_mb: many}", "params: {cycle_time_ms: -4}"),
        *("params: {cache_capacity: 1.5}", "autotune: {enabled: 'no'}", "stall_check: {enabled: 3}"),
        *("logging: {level: loud}", "timeline: {filename: 7}"),
    ],
)
def test_mistake_in_the_config_file_is_an_error(tmp_path, text):
    (tmp_path / "c").write_text(text)
    with pytest.raises(LaunchError):
        read_config_file(parse("--config-file", str(tmp_path / "c")))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("-np 2 --max-np 3", "--max-np is for elastic jobs: give --min-np"),
        ("-np 2 --elastic-timeout 3", "--elastic-timeout is for elastic jobs"),
        ("-np 2 --min-np 3", "-np 2 is less than --min-np 3"),
        ("-np 3 --min-np 2 --max-np 2", "--max-np 2 is less than"),
        ("--min-np 2 --blacklist-cooldown-range 9 3", "MIN must not be greater than MAX"),
        ("--min-np 2 --mpi", "--mpi cannot lose or gain ranks"),
        ("--host-discovery-script /nowhere", "/nowhere cannot be run: No such file"),
        ("--min-np 3 -H localhost:2", "the hosts have 2 slots (localhost:2) where 3 are needed"),
    ],
)
def test_elastic_flags_that_contradict_each_other_are_one_clear_line(capsys, flags, text):
    assert main([*flags.split(), "true"]) != 0
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert text in error[0]


def test_elastic_settings_of_the_config_file(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "elastic: {min_np: 2, max_np: 8, slots_per_host: 3, timeout: 90, reset_limit: 5,\n"
        "  blacklist_cooldown_range: [10, 100], host_discovery_script: hosts.sh}\n"
    )
    args = parse("--config-file", str(config), "--max-np", "6")
    read_config_file(args)
    assert variables_from(args) == {}
    plan = elastic_plan(args)
    settings = plan.settings
    assert (settings.min_np, settings.max_np, settings.reset_limit) == (2, 6, 5)
    assert (settings.elastic_timeout, settings.cooldown, settings.may_grow) == (90, (10, 100), True)
    assert plan.script.path == "hosts.sh"
    config.write_text("elastic: {blacklist_cooldown_range: [10]}\n")
    with pytest.raises(LaunchError, match="expected two numbers"):
        read_config_file(parse("--config-file", str(config)))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["true"], "-np"),
        (["-np", "2"], "no command"),
        (["-np", "0", "true"], "-np 0"),
        (["-np", "3", "-H", "localhost:2", "true"], "2 slots"),
        (["-hostfile", "/nowhere", "true"], "/nowhere"),
        (["--jsrun", "-np", "1", "true"], "--mpi"),
        (["-np", "1", "--compression", "gzip", "true"], "no method 'gzip'"),
        (["-np", "1", "--compression", "rank_dad:rank=0", "true"], "rank=0"),
        (
            ["-np", "1", "--local-steps", "0", "true"],
            "--local-steps 0: local_steps='0' is not possible; a whole",
        ),
        (["-np", "1", "--outer", "lr=-1", "true"], "lr=-1.0 is not possible; a number above 0"),
        (["-np", "1", "--delay", "2", "true"], "delay=2 is not possible; a whole number from 0 to 1"),
        (["-np", "1", "--cache-capacity", "-5", "true"], "--cache-capacity -5"),
        (["-np", "1", "--threads-per-rank", "0", "true"], "--threads-per-rank 0: expected a whole number"),
        (["-np", "1", "--start-timeout", "-1", "true"], "--start-timeout -1"),
        (["-np", "1", "--report", "/nowhere/report", "true"], "/nowhere/report"),
        (["-np", "1", "--output-filename", "/proc/nowhere", "true"], "/proc/nowhere"),
    ],
)
def test_mistakes_say_what_to_type(capsys, args, text):
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("dadrun: ")
    assert text in error


def test_working_directory_that_is_gone_is_one_clear_line(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    try:
        assert main(["-np", "1", "true"]) == 2
    finally:
        os.chdir(tmp_path)
    assert capsys.readouterr().err == (
        "dadrun: the working directory has been deleted; cd to one that exists\n"
    )


@pytest.mark.parametrize(
    ("flag", "meant"), [("--compresion=fp16", "--compression"), ("--thread-per-rank", "--threads-per-rank")]
)
def test_unknown_flag_suggests_the_nearest(capsys, flag, meant):
    with pytest.raises(SystemExit) as exit:
        main(["-np", "1", flag, "true"])
    assert exit.value.code == 2
    assert f"unrecognized arguments: {flag} (did you mean {meant}?)" in capsys.readouterr().err


def test_unknown_key_of_the_config_file_suggests_the_nearest(tmp_path):
    for text, meant in (("parms: {}", "params"), ("params: {cycle_time: 1}", "cycle_time_ms")):
        (tmp_path / "c").write_text(text)
        with pytest.raises(LaunchError, match=rf"did you mean {meant}\?"):
            read_config_file(parse("--config-file", str(tmp_path / "c")))


@pytest.mark.parametrize("number", ["-1", "inf", "nan", "many"])
def test_a_flag_out_of_range_is_refused_by_name(capsys, number):
    with pytest.raises(SystemExit) as exit:
        main(["-np", "1", "--cycle-time-ms", number, "true"])
    assert exit.value.code == 2
    assert "--cycle-time-ms" in capsys.readouterr().err


def test_what_stays_on_this_host():
    assert exportable({"A": "1", "OLDPWD": "/", "CUDA_VISIBLE_DEVICES": "0", "BASH_FUNC_x%%": "()"}) == {
        "A": "1"
    }


# ---- MPI's command line


def mpi_job(environment, interfaces=None, **arguments):
    hosts = [Host("a", 2), Host("b", 4)]
    plan = LaunchPlan(hosts, ["python", "x.py"], 3, ssh=SshOptions(2222, "key"), interfaces=interfaces)
    net = Network(["a", "b"], "10.0.0.9", interfaces)
    return MpiJob("mpirun", plan, assign_ranks(hosts, 3), net, environment, **arguments)


def test_command_for_open_mpi():
    environment = {"PATH": "/bin", "BAD-NAME": "", "OLDPWD": ""}
    command = openmpi_command(mpi_job(environment, interfaces="eth0", mpi_args="--mca x y"))
    text = " ".join(command)
    assert text.startswith("mpirun -np 3 --host a:2,b:1 --bind-to none --map-by slot")
    assert text.endswith("-x PATH --mca x y python x.py")
    assert "--mca btl_tcp_if_include eth0" in text
    ssh = command[command.index("plm_rsh_args") + 1]
    assert "BatchMode=yes" in ssh and ssh.endswith("-p 2222 -i key")
    assert "StrictHostKeyChecking=accept-new" in ssh


def test_open_mpi_is_kept_to_the_network_that_has_all_hosts(monkeypatch):
    monkeypatch.setattr(
        network, "common_subnet", lambda hosts: "10.0.0.0/24" if hosts == ["a", "b"] else None
    )
    text = " ".join(openmpi_command(mpi_job({})))
    assert "--mca btl_tcp_if_include 10.0.0.0/24 --mca oob_tcp_if_include 10.0.0.0/24" in text
    # Whoever has chosen knows better, and Open MPI takes a setting only once.
    for job in (
        mpi_job({}, mpi_args="--mca btl_tcp_if_exclude docker0"),
        mpi_job({"OMPI_MCA_btl_tcp_if_include": "eth1"}),
    ):
        assert "10.0.0.0/24" not in " ".join(openmpi_command(job))


def test_server_listens_only_on_the_address_that_the_ranks_use():
    with start_server(Network(["a"], "127.0.0.2", None), {}) as server:
        socket.create_connection(("127.0.0.2", server.port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)
    with pytest.raises(LaunchError, match="cannot listen on 192.0.2.1.*--network-interfaces"):
        start_server(Network(["a"], "192.0.2.1", None), {})


def test_subnet_is_one_that_has_all_hosts(monkeypatch):
    ours = {
        network._SIOCGIFADDR: {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.9"},
        network._SIOCGIFNETMASK: {"lo": "255.0.0.0", "docker0": "255.255.0.0", "eth0": "255.255.255.0"},
    }
    monkeypatch.setattr(network, "_ask_interfaces", ours.__getitem__)
    assert network.common_subnet(["10.0.0.1", "10.0.0.2"]) == "10.0.0.0/24"
    assert network.common_subnet(["10.0.0.1", "10.0.1.2"]) is None
    assert network.common_subnet(["127.0.0.1"]) is None


def test_settings_for_open_mpi_reach_it_but_not_those_of_an_outer_job():
    plan = LaunchPlan(
        [Host("a", 1)], ["x"], environment={"OMPI_MCA_btl": "tcp,self", "OMPI_UNIVERSE_SIZE": "4"}
    )
    environment = mpi_environment(plan, Network([], "127.0.0.1", None), 1)
    assert environment["OMPI_MCA_btl"] == "tcp,self"
    assert "OMPI_UNIVERSE_SIZE" not in environment
    plan.environment["OMPI_COMM_WORLD_RANK"] = "0"
    assert "OMPI_MCA_btl" not in mpi_environment(plan, Network([], "127.0.0.1", None), 1)


def test_command_for_mpich():
    environment = {}
    command = mpich_command(mpi_job(environment, interfaces="eth0", binding_args="-bind-to core"))
    text = " ".join(command)
    assert text == "mpirun -np 3 -hosts a:2,b:1 -prepend-rank -bind-to core -iface eth0 python x.py"
    ssh = environment["HYDRA_LAUNCHER_EXTRA_ARGS"]
    assert "BatchMode=yes" in ssh and ssh.endswith("-p 2222 -i key")
    assert "StrictHostKeyChecking=accept-new" in ssh
    # Without an interface the others call back at the address that they can reach.
    assert " -localhost 10.0.0.9 " in " ".join(mpich_command(mpi_job({})))
