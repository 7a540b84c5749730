#!/bin/bash
# Which lines tests reach: scripts/coverage.sh [cpp] [python]. Both if neither is named.
#
#   cpp      the core, by the C++ tests, in build/coverage; needs gcov, which comes with g++
#   python   python/dad, by pytest, ranks included; needs coverage: pip install 'coverage>=7.10'
#            PYTEST='tests/python/planning' for some of the tests
#
# A table by folder; SHOW=dad_core/codec lists the lines of these files that no test reaches.
set -euo pipefail
cd "$(dirname "$0")/.."

cpp() {
  echo "coverage: C++, in build/coverage"
  cmake --preset coverage > /dev/null
  cmake --build build/coverage --parallel "$(nproc)" | tail -n 1
  find build/coverage -name '*.gcda' -delete
  build/coverage/tests/cpp/dad_tests --gtest_brief=1
  build/coverage/tests/cpp/gpu/dad_gpu_tests --gtest_brief=1
  find build/coverage -name '*.gcda' -print0 |
    xargs -0 gcov --json-format --stdout 2> /dev/null |
    .venv/bin/python scripts/coverage_table.py dad_core ${SHOW:+--show "$SHOW"}
}

python() {
  local python=.venv/bin/python
  $python -c 'import coverage' 2> /dev/null ||
    { echo "coverage: no coverage here: pip install 'coverage>=7.10'" >&2; exit 1; }
  echo "coverage: Python, in build/coverage-python"
  rm -rf build/coverage-python
  mkdir -p build/coverage-python
  export COVERAGE_FILE=$PWD/build/coverage-python/data
  # shellcheck disable=SC2086
  $python -m coverage run -m pytest -q ${PYTEST:-} || echo "coverage: some tests have failed"
  $python -m coverage combine --quiet
  $python -m coverage report --skip-covered --sort=cover ${SHOW:+--show-missing --include="$SHOW*"}
}

for part in "${@:-cpp python}"; do
  for name in $part; do
    case $name in
      cpp | python) "$name" ;;
      *) echo "coverage: cpp or python, not $name" >&2; exit 2 ;;
    esac
  done
done
