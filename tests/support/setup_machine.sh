#!/usr/bin/env bash
# Installs what some tests need from the machine, with apt as root in a container: Chromium for the browser tests, Slurm for the
# cluster tests (without starting services). Then the pinned checkouts of kohya's trainers. What cannot be installed is one line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

install() { # install NAME COMMAND PACKAGE…: the packages, unless COMMAND is there
    local name=$1 command=$2
    shift 2
    if command -v "$command" >/dev/null 2>&1; then
        return 0
    fi
    if [ "$(id -u)" != 0 ] || [ -d /run/systemd/system ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "Hangproof: $name is not installed (by apt, as root, in a container only); its tests are skipped" >&2
        return 0
    fi
    echo "Hangproof: installing $name …" >&2
    if ! { apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y -qq --no-install-recommends "$@"; } \
        >/dev/null 2>&1; then
        echo "Hangproof: $name cannot be installed by apt-get install $*; its tests are skipped" >&2
    fi
}

if apt-cache show chromium-headless-shell >/dev/null 2>&1 || ! command -v chromium >/dev/null 2>&1; then
    install "Chromium's headless shell" chromium-headless-shell chromium-headless-shell fonts-noto-color-emoji
fi
command -v chromium-headless-shell >/dev/null 2>&1 || install Chromium chromium chromium fonts-noto-color-emoji
install Slurm slurmctld slurmctld slurmd slurm-client munge
tests/support/get_checkouts.sh >/dev/null
