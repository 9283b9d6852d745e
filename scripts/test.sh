#!/usr/bin/env bash
# Install what the tests need into .venv and run format, lint, types and the quick tests. Arguments go to pytest.
#   bash scripts/test.sh [-k NAME ...]
#   bash scripts/test.sh -m "not gpu"   the slow tests too
#   bash scripts/test.sh -n 0 --pdb     one process, in which a debugger works
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[test]'
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
# A worker for each CPU this process may use; eight at most, as each imports torch (half a gigabyte) and the longest file bounds them.
workers=$(.venv/bin/python -c "from data.tokenizers import thread_count; print(min(8, thread_count()))")
# Whole files, as their fixtures are runs that their tests share, in conftest.py's order and not by their numbers of tests.
.venv/bin/python -m pytest -m "not gpu and not slow" -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
