#!/bin/bash
# The C++ tests, and the corpus of the fuzz targets, under sanitizers: build/tsan, then build/asan (with UBSan).
set -euo pipefail
cd "$(dirname "$0")/.."

check() { # check PRESET, of CMakePresets.json
  echo "sanitize: $1, in build/$1"
  cmake --preset "$1" > /dev/null
  cmake --build "build/$1" --parallel "$(nproc)" | tail -n 1
  "build/$1/tests/cpp/dad_tests" --gtest_brief=1
  "build/$1/tests/cpp/gpu/dad_gpu_tests" --gtest_brief=1
  "build/$1/tests/fuzz/dad_fuzz_replay" tests/fuzz/corpus
}

export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1"
export ASAN_OPTIONS="detect_leaks=1 detect_stack_use_after_return=1"
export UBSAN_OPTIONS="print_stacktrace=1"
check tsan
check asan
