#!/usr/bin/env bash
# Install what the tests need into .venv and run everything: format, lint, types, tests. Arguments go to pytest.
#   bash scripts/test.sh [-k NAME ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[test]'
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest -m "not gpu" "$@"
