#!/usr/bin/env bash
# ./start.sh [--port N] [--no-browser] [--listen --auth USER:PASSWORD]   serves the page on 127.0.0.1:7860
# ./start.sh demo [--json]       trains a tiny LoRA without a browser, with an injected hang and its recovery
# ./start.sh doctor [--quick]    says whether this machine and its trainers are ready, and what to do
# ./start.sh sd-scripts          installs kohya's sd-scripts at the tested commit, in its own environment
# ./start.sh musubi              installs kohya's musubi-tuner in the same way
# ./start.sh COMMAND ...         any other command (hangproof.py lists them), such as ./start.sh status cat
set -euo pipefail
from=$PWD
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}" || echo "${BASH_SOURCE[0]}")")"
. ./setup.sh
set_up requirements.txt
home=$PWD
case "${1:-}" in "" | --*) program=app.py ;; *) program=hangproof.py ;; esac
cd "$from" && exec "$home/.venv/bin/python" "$home/$program" "$@"
