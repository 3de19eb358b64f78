#!/usr/bin/env bash
# ./start.sh [--port N] [--no-browser] [--listen --auth USER:PASSWORD]   the page, on 127.0.0.1:7860
# ./start.sh demo [--json]       no browser: a tiny real LoRA run, a hang put in on purpose, recovery
# ./start.sh sd-scripts          clones the pinned sd-scripts and makes its environment
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./setup.sh
set_up requirements.txt
case "${1:-}" in
demo)
    shift
    exec .venv/bin/python demo.py "$@"
    ;;
sd-scripts)
    shift
    exec .venv/bin/python -m sd_scripts_patches.install "$@"
    ;;
*) exec .venv/bin/python app.py "$@" ;;
esac
