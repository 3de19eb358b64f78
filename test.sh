#!/usr/bin/env bash
# ./test.sh          sets up, then runs the everyday tests: everything quick, and one real journey of each kind
# ./test.sh all      all tests but the campaigns (CONTRIBUTING.md lists those)
# ./test.sh setup    installs what some tests need from the machine: Chromium, Slurm, kohya's trainers. As root, in a container
# ./test.sh WORDS    hands these words to pytest: files, -k, …
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./setup.sh

if [ "${1:-}" = setup ]; then
    exec tests/support/setup_machine.sh
fi
set_up requirements-dev.txt

# Chromium: the one named, the distribution's (its headless shell draws no window), Chrome, or Playwright's. Without any, the browser tests are skipped and say so.
for name in "${CHROMIUM:-}" chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable \
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; do
    if [ -n "$name" ] && CHROMIUM=$(command -v "$name"); then
        export CHROMIUM
        break
    fi
done

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

case "${1:-}" in
    "") set -- -m "(unit or process or network) and not slow or journey" ;;
    all) shift && set -- -m "not campaigns" "$@" ;;
esac
# Three files at a time, because most tests wait for processes. A file is not split, because its tests share fixtures that are slow to set up.
code=0
.venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || code=$?
if [ "$code" = 1 ]; then
    echo "Hangproof: the failed tests run once more, alone. A test that passes now is FLAKY, which is a fault of its own: the run fails" >&2
    HANGPROOF_SECOND_RUN=1 .venv/bin/python -m pytest --last-failed --last-failed-no-failures none --maxfail 5 "$@" || true
fi
exit "$code"
