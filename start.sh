#!/usr/bin/env bash
# ./start.sh [--port N] [--no-browser] [--listen --auth-file FILE]   serves the page on 127.0.0.1:7860
# ./start.sh demo [--json]       trains a tiny LoRA without a browser, with an injected hang and its recovery
# ./start.sh doctor [--quick]    says whether this machine and its trainers are ready, and what to do
# ./start.sh sd-scripts          installs kohya's sd-scripts at the tested commit, in its own environment
# ./start.sh musubi              installs kohya's musubi-tuner in the same way
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./setup.sh
set_up requirements.txt
case "${1:-}" in
demo)
    shift
    exec .venv/bin/python demo.py "$@"
    ;;
doctor)
    shift
    exec .venv/bin/python doctor.py "$@"
    ;;
sd-scripts)
    exec .venv/bin/python -m sd_scripts_patches.install "$@"
    ;;
musubi)
    exec .venv/bin/python -m sd_scripts_patches.install "$@"
    ;;
*) exec .venv/bin/python app.py "$@" ;;
esac
