#!/usr/bin/env bash
# ./test.sh [pytest arguments]   sets up, then runs the tests (without arguments: all tests except the long ones)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./setup.sh
set_up requirements-dev.txt

find_browser() {
    local name
    for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable \
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; do
        if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1; then
            command -v "$name"
            return 0
        fi
    done
    .venv/bin/python - <<'PYTHON' 2>/dev/null
from pathlib import Path

from playwright.sync_api import sync_playwright

with sync_playwright() as p:
    path = p.chromium.executable_path
raise SystemExit(0 if Path(path).exists() and not print(path) else 1)
PYTHON
}

if ! CHROMIUM=$(find_browser); then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "Hangproof: installing Chromium from the distribution's packages for the browser tests …" >&2
        (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium) >/dev/null 2>&1 || true
    fi
    CHROMIUM=$(find_browser) || echo "Hangproof: no browser found (Chromium, Chrome or Playwright's); the browser tests are skipped" >&2
fi
export CHROMIUM

# The tests of Slurm start a cluster of their own. Installed only in a container, and without starting services (RUNLEVEL=1).
if [ "$(id -u)" = 0 ] && [ ! -d /run/systemd/system ] && ! command -v slurmctld >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1; then
    echo "Hangproof: installing Slurm from the distribution's packages for its tests …" >&2
    (apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends \
        slurmctld slurmd slurm-client munge) >/dev/null 2>&1 ||
        echo "Hangproof: Slurm cannot be installed; its tests are skipped" >&2
fi

.venv/bin/ruff check . >&2
.venv/bin/ruff format --check --quiet . >&2 || {
    echo "Hangproof: files are not formatted; run .venv/bin/ruff format ." >&2
    exit 1
}
.venv/bin/mypy --no-error-summary >&2 || {
    echo "Hangproof: mypy found wrong types, see above; run .venv/bin/mypy again after fixing them" >&2
    exit 1
}
# The tests start some thousand processes: without this, each compiles the project's modules again where this variable is set.
unset PYTHONDONTWRITEBYTECODE

run() {
    .venv/bin/python -m pytest -m "not long" "$@"
}

# Three files at a time, because most tests wait for processes. A file is not split, because its tests share fixtures that are slow to set up.
code=0
run -n 3 --dist loadfile --no-loadscope-reorder "$@" || code=$?
[ "$code" = 1 ] || exit "$code"
# A test that waited longer than its limit because the machine was busy passes alone; one that found a fault fails again.
echo "Hangproof: what failed is run once more, alone" >&2
run --last-failed --last-failed-no-failures none --maxfail 5 "$@"
