#!/usr/bin/env bash
# Fetches kohya's trainers at the commits that the tests train with into .upstream/, and makes one environment for all of them
# there (.upstream/venv, PyTorch for the processor). Prints the export lines that tests/upstream needs, and writes them to
# .upstream/environment. Where that is not possible, it prints one line that says why, leaves no exports, and exits with 0.
#
# HANGPROOF_UPSTREAM  where the repositories are, in place of GitHub: a URL or folder that has sd-scripts and musubi-tuner
# PYTHON              the interpreter that makes the environment (3.10 to 3.12)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=$PWD/.upstream
mkdir -p "$here"
rm -f "$here/environment"

cannot() {
    echo "Hangproof: kohya's trainers cannot be fetched here ($1); tests/upstream is skipped" >&2
    exit 0
}

python=
for name in "${PYTHON:-}" python3.11 python3.12 python3.10 python3 python; do
    if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
        python=$name
        break
    fi
done
[ -n "$python" ] || cannot "they need Python 3.10 to 3.12, and there is none"
command -v git >/dev/null 2>&1 || cannot "git is not installed"

bounded() { # bounded SECONDS COMMAND…: within a limit; its first line of errors is the reason
    local seconds=$1 code=0
    shift
    GIT_TERMINAL_PROMPT=0 timeout "$seconds" "$@" >/dev/null 2>"$here/errors" || code=$?
    if [ "$code" = 124 ]; then
        cannot "$1 took longer than $seconds s"
    elif [ "$code" != 0 ]; then
        tr -d '\0' <"$here/errors" | grep -E '^(fatal|ERROR|error): ' >"$here/reasons" || tail -n 1 "$here/errors" >"$here/reasons"
        cannot "$(head -n 1 "$here/reasons" | sed 's/^[a-zA-Z]*: //')"
    fi
}

# FOLDER REPOSITORY COMMIT, one line each, from the table of the trainers
"$python" - "${HANGPROOF_UPSTREAM:-}" >"$here/pins" <<'PYTHON'
import sys

from sd_scripts_patches.trainers import TRAINERS

for trainer in TRAINERS.values():
    name = trainer.url.rsplit("/", 1)[-1].removesuffix(".git")
    source = f"{sys.argv[1].rstrip('/')}/{name}" if sys.argv[1] else trainer.url
    print(name, source, trainer.commit)
    if trainer.key == "sd-scripts":
        print("sd-scripts-0.10.1", source, trainer.tested[0])
PYTHON

while read -r folder source commit; do
    if [ "$(git -C "$here/$folder" rev-parse HEAD 2>/dev/null)" = "$commit" ]; then
        continue
    fi
    rm -rf "${here:?}/$folder" "$here/new"
    bounded 60 git init --quiet "$here/new"
    bounded 300 git -C "$here/new" -c http.lowSpeedLimit=1000 -c http.lowSpeedTime=30 fetch --quiet --depth 1 "$source" "$commit"
    bounded 60 git -C "$here/new" -c advice.detachedHead=false checkout --quiet FETCH_HEAD
    mv "$here/new" "$here/$folder"
done <"$here/pins"

# Both trainers' requirements, without what only a GPU or a dataset of videos needs. Where they differ, musubi-tuner's are newer.
"$python" - "$here" >"$here/requirements.txt" <<'PYTHON'
import re
import sys
from pathlib import Path

from sd_scripts_patches import trainers

pinned = {}
for folder in ("sd-scripts", "musubi-tuner"):
    for line in trainers.requirements(Path(sys.argv[1]) / folder):
        name = re.match(r"[\w-]+", line)
        if name and name[0] != "bitsandbytes":
            pinned[name[0].lower()] = line.replace("diffusers[torch]", "diffusers")
print("\n".join([trainers.TORCH[0], *pinned.values(), "tensorboard", "psutil", "pytest"]))
PYTHON

if ! cmp -s "$here/requirements.txt" "$here/venv/requirements.txt"; then
    rm -rf "$here/venv"
    bounded 300 "$python" -m venv "$here/venv"
    bounded 1500 "$here/venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
    cp "$here/requirements.txt" "$here/venv/requirements.txt"
fi
cat >"$here/environment" <<EXPORTS
export SD_SCRIPTS_DIR='$here/sd-scripts-0.10.1'
export SD_SCRIPTS_0111='$here/sd-scripts'
export MUSUBI_DIR='$here/musubi-tuner'
export SD_SCRIPTS_PYTHON='$here/venv/bin/python'
EXPORTS
cat "$here/environment"
