#!/usr/bin/env bash
# Creates $VENV and installs turbogr with everything that belongs to it. Called by `make setup`; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}"
PY="$VENV/bin/python"

fail() {
    echo "make setup: $*" >&2
    exit 1
}

# $1: an interpreter; true when turbogr supports it.
supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not a program"
    supported "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 | grep -m 1 .), turbogr needs Python 3.11 or newer"
else
    for candidate in python3.11 python3 python; do
        if supported "$candidate"; then
            PYTHON="$candidate"
            break
        fi
    done
    [ -n "${PYTHON:-}" ] || fail "no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python3.11"
fi

if [ -x "$PY" ] && ! supported "$PY"; then
    fail "$VENV was made with $("$PY" --version 2>&1), turbogr needs Python 3.11 or newer; remove $VENV and try again"
fi
# A venv without pip is what an interrupted or failed (no ensurepip) creation leaves behind.
if ! "$PY" -m pip --version >/dev/null 2>&1; then
    echo "Creating $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv --clear "$VENV" || fail "could not create $VENV (on Debian and Ubuntu: apt-get install python3.11-venv)"
fi

pip_install() { "$PY" -m pip install --disable-pip-version-check "$@"; }

# torch first, so that nothing that follows can choose another release of it.
TORCH="$("$PY" -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(next(r for r in tomllib.load(file)["project"]["dependencies"] if r.startswith("torch==")))')"
pip_install "$TORCH"
pip_install --editable ".[dev,torchrec]"

# torchrec's own requirements would pull the CUDA build of fbgemm over the CPU one and hold torchmetrics at 1.0.3, hence
# --no-deps. Which fbgemm fits the torch that was just installed is known to turbogr.
read -r -a COMPANIONS <<<"$("$PY" -m turbogr doctor --companions)"
if ! pip_install --no-deps "${COMPANIONS[@]}"; then
    echo "make setup: ${COMPANIONS[*]} could not be installed here. Training on one device works without them;" >&2
    echo "make setup: only distributed embedding tables need them (see: $PY -m turbogr doctor)" >&2
fi
