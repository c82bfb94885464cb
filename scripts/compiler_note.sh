#!/usr/bin/env bash
# One line for people without a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
# The same choice as turbogr/ops/native.py: $CXX, else g++.
read -r -a compiler <<<"${CXX:-g++}"
command -v "${compiler[0]}" >/dev/null ||
    echo "no C++ compiler found: attention uses PyTorch, which is slower (install g++, or set CXX, to use the CPU kernel)" >&2
