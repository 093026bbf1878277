#!/bin/sh
# Creates .venv at the root of the checkout with a supported Python, and installs the pinned
# requirements into it. Does nothing if that has already been done.
#
#   scripts/setup.sh          what training needs (requirements.txt)
#   scripts/setup.sh --dev    also what tests and lint need (requirements-dev.txt)
#
# It looks for a Python on PATH, then among pyenv's versions (a pyenv shim that only prints an error
# is skipped), and fetches one with uv if there is none. PYTHON=/path/to/python selects one.
set -eu
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# True if the interpreter runs, is new enough for JAX and can create a virtual environment.
# Some wheels are not yet built for the newest Pythons, hence the upper bound.
usable() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))' \
    >/dev/null 2>&1
}

pyenv_versions() {
  roots=${PYENV_ROOT:-$HOME/.pyenv}
  # A shim folder on PATH shows its pyenv root even if HOME is another user's.
  for folder in $(printf '%s' "$PATH" | tr ':' ' '); do
    case $folder in */shims) roots="$roots ${folder%/shims}" ;; esac
  done
  for version in 3.12 3.13 3.14; do
    for root in $roots; do
      for python in "$root"/versions/"$version"*/bin/python3; do echo "$python"; done
    done
  done
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.12 to 3.14 with the venv module"
    echo "$PYTHON"
    return
  fi
  for python in python3.12 python3.13 python3.14 python3 python $(pyenv_versions); do
    if usable "$python"; then
      echo "$python"
      return
    fi
  done
}

# uv provides its own Python; uv itself is installed from the package index by any older Python.
fetch_python() {
  say "no Python 3.12 to 3.14 found; fetching one with uv"
  if command -v uv >/dev/null 2>&1; then
    uv=uv
  else
    python3 -m venv --clear .venv || die "no uv, and no python3 to fetch it with: install Python 3.12"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
    uv=.venv/bin/uv
  fi
  # Only uv's own Pythons: a shim on PATH that fails would stop its search.
  "$uv" python install --no-progress 3.12 || die "uv could not fetch Python 3.12: install it, or set PYTHON="
  "$uv" python find --managed-python 3.12
}

make_venv() {
  python=$(find_python)
  [ -n "$python" ] || python=$(fetch_python)
  [ -n "$python" ] || die "no usable Python: install Python 3.12, or set PYTHON=/path/to/python3.12"
  say "creating .venv with $("$python" --version) ($python)"
  "$python" -m venv --clear .venv
}

install() { # install LIST: once per content of the list
  stamp=.venv/installed-$(cksum < "$1" | tr ' ' '-')
  [ -f "$stamp" ] && return
  say "installing $1"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$1"
  touch "$stamp"
}

# An interrupted setup can leave an environment without pip: then it is created again.
if ! usable .venv/bin/python || ! .venv/bin/python -c "import pip" >/dev/null 2>&1; then make_venv; fi
install requirements.txt
if [ "${1:-}" = --dev ]; then install requirements-dev.txt; fi
