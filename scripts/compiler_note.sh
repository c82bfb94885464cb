#!/usr/bin/env bash
# One line for people without a C++ compiler, and only when turbogr has C++ sources that would have been compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
for compiler in "${CXX:-g++}" g++ clang++ c++; do
    if command -v "$compiler" >/dev/null; then exit 0; fi
done
if compgen -G "kernels/cpu/*.cpp" >/dev/null; then
    echo "no C++ compiler found: operators use PyTorch, which is slower (install g++ to use the CPU kernels)" >&2
else
    echo "no C++ compiler found: operators use PyTorch (turbogr ships no C++ kernels yet, so nothing is slower for it)" >&2
fi
