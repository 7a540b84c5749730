#!/bin/bash
# clang's thread-safety analysis (dad_core/util/mutex.h), and the checks of .clang-tidy, over the
# files of the core that have locks. Needs no build, but clang-tidy: pip install clang-tidy.
# scripts/tidy.sh [FILE...]: these files.
set -euo pipefail
cd "$(dirname "$0")/.."
tidy=.venv/bin/clang-tidy
[ -x "$tidy" ] || tidy=clang-tidy
command -v "$tidy" > /dev/null || { echo "tidy: no clang-tidy here: pip install clang-tidy" >&2; exit 1; }

files=("$@")
if [ ${#files[@]} -eq 0 ]; then
  # Every header with a lock is seen by one of these.
  mapfile -t files < <(find dad_core/runtime dad_core/device dad_core/util -name '*.cc' \
    -not -name '*abi_check.cc' | sort; ls dad_core/exchange/{device/bench,feedback/state_store}.cc)
fi
flags='-std=c++20 -Wall -Wextra -Wthread-safety -Idad_core -Idad_core/include
  -isystem /usr/include/eigen3 -DDAD_VERSION="0"'
# Its standard error counts the warnings of system headers.
# shellcheck disable=SC2086
if ! printf '%s\n' "${files[@]}" | xargs -P "$(nproc)" -I{} \
    "$tidy" --quiet --warnings-as-errors='*' {} -- $flags 2> /dev/null; then
  echo "tidy: see above" >&2
  exit 1
fi
