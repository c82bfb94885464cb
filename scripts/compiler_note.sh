#!/usr/bin/env bash
# One line for people without a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
# The same choice as turbogr/ops/toolchain.py: $CXX, else g++.
read -r -a compiler <<<"${CXX:-g++}"
command -v "${compiler[0]}" >/dev/null ||
    echo "no C++ compiler found: operators use PyTorch, which is slower (install g++, or set CXX, for the CPU kernels)" >&2
