# The commands of this project. `make help` lists them.
VENV := .venv
PYTHON_FILES := python tests examples scripts setup.py tools/netlab $(wildcard benchmarks)
CPP_DIRS := $(wildcard dad_core torch_ops tf_ops python/bindings tests/cpp tests/fuzz tools benchmarks)
CPP_FILES = $(shell find $(CPP_DIRS) -name '*.h' -o -name '*.cc' -o -name '*.cu')

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-14s %s\n", $$1, $$2}'

setup:  ## system packages, .venv, the build, dad in .venv; MPI and CUDA come with make build
	@scripts/setup.sh

build:  ## only the libraries, those of MPI and CUDA as well; incremental
	@scripts/setup.sh build optional

demo: setup  ## four processes train on a line of 100 Mbit: dense, exact, vgc and auto; a table and a picture
	@$(VENV)/bin/python scripts/demo.py

test: test-cpp test-python  ## all tests, C++ and Python

test-cpp: setup  ## the C++ tests
	@scripts/setup.sh tests
	build/tests/cpp/dad_tests --gtest_brief=1
	build/tests/cpp/gpu/dad_gpu_tests --gtest_brief=1
	if [ -x build/tests/cpp/gpu/dad_torch_device_tests ]; then build/tests/cpp/gpu/dad_torch_device_tests --gtest_brief=1; fi
	build/tests/fuzz/dad_fuzz_replay tests/fuzz/corpus

test-python: setup  ## the Python tests
	@scripts/setup.sh tests browser
	$(VENV)/bin/python -m pytest -q

test-sanitize: setup  ## the C++ tests under the thread, address and undefined-behaviour sanitizers
	@scripts/sanitize.sh

test-cuda12:  ## the kernels by nvcc 12.4, declarations against CUDA 12's headers; downloads 1.7 GB the first time
	@scripts/cuda12.sh

chaos: setup  ## faults at random times, and what must hold after them; CHAOS_SECONDS (150), 3600 for an hour
	@$(VENV)/bin/python tests/chaos/chaos.py --seconds $${CHAOS_SECONDS:-150}

storm: setup  ## ranks of one elastic job are killed all the time: throughput, pauses, ranks in a step; STORM_SECONDS (300)
	@$(VENV)/bin/python tests/chaos/storm.py --seconds $${STORM_SECONDS:-300}

fuzz:  ## the decoders under libFuzzer, for ten minutes or FUZZ_SECONDS
	@scripts/fuzz.sh

lint:  ## clang-format, ruff, mypy and codespell, changing nothing
	@scripts/setup.sh packages venv
	@$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)
	@$(VENV)/bin/ruff check $(PYTHON_FILES)
	@$(VENV)/bin/ruff format --check $(PYTHON_FILES)
	@$(VENV)/bin/mypy
	@$(VENV)/bin/codespell *.md docs $(PYTHON_FILES) $(CPP_DIRS)

tidy:  ## lock annotations, checked by clang-tidy if it is installed; takes minutes
	@scripts/tidy.sh

coverage:  ## which lines the tests reach, C++ and Python, by folder: scripts/coverage.sh
	@scripts/coverage.sh

format:  ## clang-format and ruff, in place
	@scripts/setup.sh packages venv
	@$(VENV)/bin/clang-format -i $(CPP_FILES)
	@$(VENV)/bin/ruff check --fix $(PYTHON_FILES)
	@$(VENV)/bin/ruff format $(PYTHON_FILES)

bench: setup  ## the shorter benchmarks: times against torch.distributed, and bytes
	@$(VENV)/bin/python benchmarks/run.py

bench-far: setup  ## ranks far apart: auto against every method, and local steps; hours
	@$(VENV)/bin/python benchmarks/far.py

docs: setup  ## generated pages and figures, and the site in build/site
	@$(VENV)/bin/python scripts/gen_options_doc.py
	@$(VENV)/bin/python scripts/gen_figures.py
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo "docs: build/site/index.html"

wheel: setup  ## a wheel in dist/ for the frameworks in .venv, which needs no compiler where it is used
	@scripts/setup.sh optional
	@$(VENV)/bin/python scripts/make_wheel.py

wheels: setup  ## the same with op libraries for every version in scripts/wheel_versions.txt
	@scripts/setup.sh optional
	@$(VENV)/bin/python scripts/make_wheel.py --all

clean:  ## what was built; not .venv
	rm -rf build build-package dist python/*.egg-info python/dad/_lib/*.so python/dad/_lib/build_info.json $(VENV)/install.stamp

.PHONY: help setup build demo test test-cpp test-python test-sanitize test-cuda12 chaos storm fuzz lint tidy coverage format bench bench-far docs wheel wheels clean
