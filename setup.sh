# Sourced by start.sh and test.sh. Creates .venv on first use and installs a requirements file into it. Runs no installer when
# the file is already installed. All messages go to standard error, because --json uses standard output.

python_for_venv() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "Hangproof: Python 3.11 to 3.14 was not found; install it, or set PYTHON=/path/to/python" >&2
    return 1
}

# The command `hangproof` of the environment. Where the folder was moved since it was written, the other programs of the environments,
# such as hf and accelerate, get its new path as well: they name their Python by it.
console_script() {
    local text was
    text=$(printf '#!/bin/sh\nexec "%s/.venv/bin/python" "%s/hangproof.py" "$@"' "$PWD" "$PWD")
    if [ -d .venv/bin ] && [ "$(cat .venv/bin/hangproof 2>/dev/null)" != "$text" ]; then
        was=$(sed -n 's|^exec "\(.*\)/\.venv/bin/python" .*|\1|p' .venv/bin/hangproof 2>/dev/null) || true
        [ -z "$was" ] || [ -L .venv ] || .venv/bin/python - "$was" "$PWD" <<'EOF' || true
import os, pathlib, re, sys
old, new = (os.fsencode(folder) + b"/.venv" for folder in sys.argv[1:])
for path in pathlib.Path().glob(".venv*/bin/*"):
    if path.is_file() and not path.is_symlink() and (data := path.read_bytes())[:1] == b"#" and old in data:
        # As pip does it for a path with spaces: lines for a shell, which are a text for Python.
        data = re.sub(rb"\A#!(%s.*)\n" % re.escape(old), rb"""#!/bin/sh\n'''exec' "\1" "$0" "$@"\n' '''\n""", data)
        path.write_bytes(data.replace(old, new))
EOF
        printf '%s\n' "$text" >.venv/bin/hangproof && chmod +x .venv/bin/hangproof || true
    fi
}

# Whether .venv has a Python that starts and finds its packages: not after the system's Python was replaced by another version.
usable() {
    local version
    version=$(.venv/bin/python -V 2>/dev/null) && [ -d ".venv/lib/python${version:7:4}/site-packages" ]
}

# Waits while another start installs, because two would remove each other's files. The lock is on descriptor 9 of this shell, which its
# installer has, too: one that outlives it keeps the lock.
lock() {
    exec 9<>setup.sh && "$1" - <<'EOF' || true
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("Hangproof: another start installs; waiting until it ends …", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
EOF
}

# set_up REQUIREMENTS: installs REQUIREMENTS into .venv. A stamp with the file's checksum is written last.
set_up() {
    local requirements=$1 stamp wanted python
    if [ -d .venv/Scripts ]; then # another system's Python would create it again, empty
        echo "Hangproof: .venv was made by Windows; run start.bat, or delete .venv to use Hangproof on this system" >&2
        return 1
    fi
    stamp=.venv/.installed-$(basename "$requirements")
    wanted=$(cat requirements.txt "$requirements" | cksum)
    if ! installed; then
        python=.venv/bin/python
        usable || python=$(python_for_venv) || return 1
        [ -w . ] || {
            echo "Hangproof: $(id -un) cannot write to $PWD, so nothing can be installed there; use a copy of your own" >&2
            return 1
        }
        case $PWD in *[\`\$\"\\]*)
            echo "Hangproof: pip's programs do not start in a folder whose path has \$, \`, \" or \\; move $PWD" >&2
            return 1
            ;;
        esac
        lock "$python"
        installed || install_requirements || return 1
        exec 9>&-
    fi
    console_script
}

# These two use the variables of set_up.
installed() {
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && usable
}

install_requirements() {
    local package advice="check that the disk has space, then run the command again"
    if ! usable || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(python_for_venv) || return 1
        echo "Hangproof: creating .venv with $("$python" --version) …" >&2
        "$python" -m venv --clear .venv >&2 || {
            rm -rf .venv
            "$python" -c 'import ensurepip' 2>/dev/null || advice="on Debian or Ubuntu run: apt install python3-venv"
            echo "Hangproof: $python cannot create a virtual environment, see above; $advice" >&2
            return 1
        }
    fi
    # Of a package whose installation was interrupted, the programs can be missing, and pip would take it for installed.
    for package in .venv/lib/python*/site-packages/*.dist-info; do
        [ -e "$package/INSTALLER" ] || rm -rf "$package"
    done
    echo "Hangproof: installing $requirements (first start only; PyTorch is a large download) …" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements" >&2 || {
        echo "Hangproof: installing $requirements failed, see above; fix the error, then run the command again" >&2
        return 1
    }
    echo "$wanted" >"$stamp"
    # Compile now, so that the first start is as fast as later ones.
    .venv/bin/python -m compileall -q app.py ui runs presets monitor guards >&2 || true
}
