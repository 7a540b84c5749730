#!/bin/bash
# Fuzzes the decoders: libFuzzer with ASan and UBSan, in build/fuzz.
#
#   scripts/fuzz.sh                       all targets of tests/fuzz
#   scripts/fuzz.sh sparse_code method    these
#   scripts/fuzz.sh --keep [TARGET...]    afterwards, inputs that reach new code go to tests/fuzz/corpus
#
# FUZZ_SECONDS: for all targets together, 600 unless told. What a run finds is kept in build/fuzz/corpus,
# where the next one begins; an input that makes a target fail is in build/fuzz/failed.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "fuzz: $*"; }
die() { echo "fuzz: $*" >&2; exit 1; }

find_clang() {
  local compiler
  for compiler in clang++-14 clang++ clang++-{20..13}; do
    if command -v "$compiler" >/dev/null; then
      echo "$compiler"
      return
    fi
  done
  die "clang++ is needed and not there"
}

build() {
  local compiler generator=()
  compiler=$(find_clang)
  if command -v ninja >/dev/null; then generator=(-G Ninja); fi
  say "building with $compiler, in build/fuzz"
  cmake -S . -B build/fuzz "${generator[@]}" -DCMAKE_CXX_COMPILER="$compiler" \
    -DDAD_SANITIZE=fuzzer-no-link,address,undefined -DDAD_PYTHON=OFF -DDAD_TORCH=OFF > /dev/null
  cmake --build build/fuzz --parallel "${FUZZ_JOBS:-$(nproc)}" --target dad_fuzz > build/fuzz/build.log ||
    { tail -n 40 build/fuzz/build.log; die "the build failed"; }
}

fuzzer() { # fuzzer TARGET ARGUMENTS...
  DAD_FUZZ_TARGET=$1 build/fuzz/tests/fuzz/dad_fuzz "${@:2}"
}

last() { sed -n "s/.*$1 *\([0-9]*\).*/\1/p" "$2" | tail -n 1; } # the last number after a word

run() { # run TARGET SECONDS
  local own=build/fuzz/corpus/$1 log=build/fuzz/$1.log
  mkdir -p "$own" "tests/fuzz/corpus/$1"
  if ! fuzzer "$1" -max_total_time="$2" -max_len=8192 -timeout=10 -malloc_limit_mb=256 -rss_limit_mb=2048 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/failed/$1-" "$own" "tests/fuzz/corpus/$1" 2> "$log"; then
    tail -n 60 "$log"
    die "$1 failed; the input is in build/fuzz/failed, the log is $log"
  fi
  say "$1: $(last number_of_executed_units: "$log") inputs in $2 s, $(last ' cov:' "$log") edges," \
    "$(last new_units_added: "$log") new inputs kept"
}

keep() { # keep TARGET: of the inputs, those that reach new code
  fuzzer "$1" -merge=1 -use_counters=0 -max_len=2048 "tests/fuzz/corpus/$1" "build/fuzz/corpus/$1" \
    2> "build/fuzz/$1.merge.log"
  say "$1: the corpus has $(find "tests/fuzz/corpus/$1" -type f | wc -l) inputs"
}

keep=
if [ "${1:-}" = --keep ]; then
  keep=1
  shift
fi
scripts/setup.sh fuzzer
build
mkdir -p build/fuzz/failed
export ASAN_OPTIONS="detect_leaks=1 allocator_may_return_null=1"
export UBSAN_OPTIONS="print_stacktrace=1"
# Exchanges have the most code behind them.
all=$(grep -ho 'Register registered({"[a-z_0-9]*' tests/fuzz/*.cc | sed 's/.*"//')
targets=(${*:-$all})
weight() { if [ "$1" = exchange ]; then echo 4; else echo 1; fi; }
total=0
for target in "${targets[@]}"; do total=$((total + $(weight "$target"))); done
for target in "${targets[@]}"; do
  run "$target" $(((${FUZZ_SECONDS:-600} * $(weight "$target") + total - 1) / total))
done
if [ -n "$keep" ]; then for target in "${targets[@]}"; do keep "$target"; done; fi
say "nothing failed"
