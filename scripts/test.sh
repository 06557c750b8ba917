#!/usr/bin/env bash
# Set-up, lint, types, tests. Arguments go to pytest: bash scripts/test.sh tests/test_packing.py -k dummy
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
bash scripts/setup.sh
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX # an active foreign environment must not leak in
export PATH="$ROOT/.venv/bin:$PATH"

ruff check --quiet .
ruff format --check --quiet . || {
  echo "these files are not formatted (run: .venv/bin/ruff format .):" >&2
  ruff format --check . >&2
  exit 1
}
pyright
python -m pytest "$@"
