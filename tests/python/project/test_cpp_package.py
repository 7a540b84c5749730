"""The CMake package: a C++ program of its own finds dad, links the core and runs under dadrun."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from util import job_environment


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=200, **options
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory, pytestconfig):
    """examples/cpp_allreduce, built against an installed dad."""
    source, build = pytestconfig.rootpath, pytestconfig.rootpath / "build"
    if not (build / "CMakeCache.txt").exists() or shutil.which("cmake") is None:
        pytest.skip("dad was not built here: make build")
    folder = tmp_path_factory.mktemp("cpp")
    run("cmake", "--install", build, "--prefix", folder / "dad")
    example = source / "examples/cpp_allreduce"
    run("cmake", "-S", example, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={folder / 'dad'}")
    run("cmake", "--build", folder / "build")
    return folder / "build/allreduce"


def test_a_cpp_program_averages_over_the_ranks(program):
    output = run(sys.executable, "-m", "dad.runner.cli", "-np", 3, program, env=job_environment())
    for rank in range(3):
        assert f"rank {rank} of 3: the average is 1" in output


def test_a_cpp_program_runs_without_a_launcher(program):
    assert "rank 0 of 1: the average is 0" in run(program)


def test_the_core_shows_only_its_interface(program):
    """What a program may link is marked DAD_EXPORT."""
    library = next(program.parent.parent.glob("dad/lib*/**/libdad_core.so"))
    shown = run("nm", "-DC", "--defined-only", library)
    assert "dad::Engine::Create(" in shown
    assert "dad::Lane::" not in shown
    assert "dad::Executor::" not in shown
