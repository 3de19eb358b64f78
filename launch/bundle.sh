#!/usr/bin/env bash
# Trains @SLUG@, supervised: a hang or a crash is noticed and the training restarted; Ctrl-C stops it with a checkpoint.
#   bash train.sh            The LoRA is then outputs/@SLUG@/@SLUG@.safetensors
# It needs Python 3.11 to 3.14 with the packages of requirements.txt: in .venv beside this file, in $PYTHON, or as python3.
# From a folder `wheels` beside this file, it makes .venv itself, without a network.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")"
export HANGPROOF_DATA=$PWD PYTHONUTF8=1
unset PYTHONPATH
version='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'
modules='import @MODULES@'
python=
if [ ! -x .venv/bin/python ] && [ -d wheels ]; then
  for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && "$candidate" -c "$version"; then
      trap 'rm -rf .venv' EXIT # half of it would be found by the next start
      "$candidate" -m venv .venv
      .venv/bin/python -m pip install --quiet --no-index --find-links wheels -r requirements.txt
      trap - EXIT
      break
    fi
  done
fi
for candidate in .venv/bin/python "${PYTHON:-}" python3; do
  if command -v "$candidate" >/dev/null && "$candidate" -c "$modules; $version" 2>/dev/null; then
    python=$(command -v "$candidate")
    break
  fi
done
if [ -z "$python" ]; then
  echo "train.sh: no Python 3.11 to 3.14 with the packages of requirements.txt; run: python3 -m venv .venv && .venv/bin/python -m pip install -r requirements.txt" >&2
  exit 1
fi
#[builtin
export TRAINER_PYTHON=${TRAINER_PYTHON:-$python}
if [ -z "${ACCELERATE:-}" ] && [ -x "${python%/*}/accelerate" ]; then
  export ACCELERATE=${python%/*}/accelerate
fi
#]
exec "$python" -m launch train @SLUG@
