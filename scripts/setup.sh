#!/bin/bash
# Brings everything that dad needs: scripts/setup.sh [packages] [venv] [headers] [build] [install]
# With no argument, these five in turn. A step that has nothing to do takes no time.
#
#   packages   Debian packages of scripts/packages.txt, if root or sudo; else names them
#   venv       .venv with the Python packages of requirements-dev.txt
#   headers    NCCL's and cuBLAS's headers into build/gpu, where nvcc is: the build compares declarations with them
#   build      C++: build/, libraries into python/dad/_lib
#   optional   the same of MPI and CUDA, which the demo does not need
#   install    dad into .venv, editable: changes in python/ count at once
#   tests      all that can be built, with the C++ tests: build/tests
#   fuzzer     Debian packages of `make fuzz`
#   browser    the Debian package with which `make test` opens the page of `dad report`
#
# PYTHON=/path/to/python3 chooses the interpreter of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

missing() { # missing KIND: names of packages of that kind that are not installed
  local kind name _
  while read -r kind name _; do
    [ "$kind" = "$1" ] || continue
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || echo "$name"
  done < scripts/packages.txt
}

root() { # runs a command as root, or fails
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

bring() { # bring KINDS...: installs what is missing, if root or sudo; else names it and returns 1
  if ! command -v dpkg-query >/dev/null; then
    say "packages: not a Debian system; see scripts/packages.txt for what is needed"
    return
  fi
  local kind names
  names=$(for kind in "$@"; do missing "$kind"; done)
  if [ -z "$names" ]; then
    say "packages: all there"
    return
  fi
  say "packages: missing:" $names
  if [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; then
    say "packages: installing with apt-get"
    root apt-get update -qq || die "apt-get update failed"
    root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $names \
      > /dev/null || die "apt-get install failed"
    return
  fi
  say "packages: neither root nor sudo here; to install them: apt-get install" $names
  return 1
}

packages() { bring needed optional || check_tools; }

browser() { (bring browser) || true; } # without one its tests are skipped
fuzzer() { bring fuzzer || true; } # scripts/fuzz.sh looks for a clang of any version

check_tools() { # without root: go on when a build is possible all the same
  local tool
  for tool in g++ cmake make; do
    command -v "$tool" >/dev/null || die "$tool is needed and not there"
  done
  say "packages: going on with what is there"
}

find_python() {
  local python
  for python in ${PYTHON:-python3 /usr/bin/python3}; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  die "no Python 3.10 or newer with venv; set PYTHON"
}

current() { # current STAMP FILES...: the stamp was written for these contents
  local stamp=$1
  shift
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(cat "$@" | sha256sum)" ]
}
stamp() {
  local stamp=$1
  shift
  cat "$@" | sha256sum > "$stamp"
}

venv() {
  if current .venv/requirements.stamp requirements-dev.txt; then
    say "venv: .venv is current"
    return
  fi
  if [ ! -x .venv/bin/pip ]; then
    local python
    python=$(find_python)
    say "venv: making .venv with $("$python" --version)"
    "$python" -m venv .venv
  fi
  say "venv: installing requirements-dev.txt (torch and TensorFlow are large)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
  stamp .venv/requirements.stamp requirements-dev.txt
}

# Of packages that are 300 and 400 MB of library, which is not kept; without them the build goes on.
headers() {
  if ! command -v nvcc >/dev/null; then return; fi
  bring_headers NCCL nvidia-nccl-cu13==2.32.3 nccl.h
  bring_headers cuBLAS nvidia-cublas==13.8.2.12 cublas_v2.h cublas_api.h
}
bring_headers() { # bring_headers LIBRARY PACKAGE FILES...
  local library=$1 package=$2 folder place
  shift 2
  for place in build/gpu/include /usr/include "$(dirname "$(readlink -f "$(command -v nvcc)")")/../include"; do
    if [ -f "$place/$1" ]; then
      say "headers: $library's are there"
      return
    fi
  done
  folder=$(mktemp -d)
  if timeout 180 .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --timeout 20 \
    --retries 1 -d "$folder" "$package" 2>/dev/null && unpack_headers "$folder" "$@"; then
    say "headers: $library's, from $package"
  else
    say "headers: $package cannot be had; declarations of $library are not checked"
  fi
  rm -rf "$folder"
}
unpack_headers() { # the first is written last: if it is there they all are
  .venv/bin/python - "$@" <<'END'
import pathlib, sys, zipfile
folder, *names = sys.argv[1:]
target = pathlib.Path("build/gpu/include")
for wheel in pathlib.Path(folder).glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        found = {pathlib.PurePosixPath(entry).name: entry for entry in archive.namelist()}
        target.mkdir(parents=True, exist_ok=True)
        for name in reversed(names):
            (target / name).write_bytes(archive.read(found[name]))
        sys.exit(0)
sys.exit(1)
END
}

build() {
  say "build: C++ in build/, libraries into python/dad/_lib"
  .venv/bin/python setup.py --quiet build_ext --inplace
}
optional() { compile optional_libraries "other transports and CUDA kernels into python/dad/_lib"; }
tests() { compile all "all of it, with the C++ tests in build/tests"; }
compile() { # compile TARGET WHAT
  say "build: $2"
  .venv/bin/python scripts/build_progress.py "build/$1.log" build "$1"
}

install() {
  if current .venv/install.stamp setup.py pyproject.toml python/dad/_version.py && [ -x .venv/bin/dadrun ]; then
    say "install: dad is in .venv"
    return
  fi
  say "install: dad into .venv, editable"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
  stamp .venv/install.stamp setup.py pyproject.toml python/dad/_version.py
}

for step in "${@:-packages venv headers build install}"; do
  for name in $step; do
    case $name in
      packages | venv | headers | build | optional | tests | install | fuzzer | browser) "$name" ;;
      *) die "no such step: $name" ;;
    esac
  done
done
