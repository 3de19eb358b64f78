# Sourced by start.sh and test.sh: makes .venv on first use and brings it to a requirements file. A second call that has
# nothing to do runs no installer. Everything it says goes to standard error, so that --json output stays clean.

python_for_venv() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "Hangproof needs Python 3.11 to 3.14 and found none: install one, or name it with PYTHON=/path/to/python" >&2
    return 1
}

# set_up REQUIREMENTS: .venv holds exactly what REQUIREMENTS pins (a stamp of its bytes says so, written last).
set_up() {
    local requirements=$1 stamp=.venv/.installed wanted python
    wanted=$(cat requirements.txt "$requirements" | cksum)
    case "$(cat "$stamp-$(basename "$requirements")" 2>/dev/null)" in "$wanted") return 0 ;; esac
    if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(python_for_venv) || return 1
        echo "Hangproof: making .venv with $("$python" --version) …" >&2
        "$python" -m venv .venv >&2 || {
            rm -rf .venv
            echo "Hangproof: $python cannot make a virtual environment (on Debian or Ubuntu: apt install python3-venv)" >&2
            return 1
        }
    fi
    echo "Hangproof: installing $requirements (once; PyTorch is large) …" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements" >&2 || {
        echo "Hangproof: the install of $requirements failed, see above; run the command again once that is mended" >&2
        return 1
    }
    echo "$wanted" >"$stamp-$(basename "$requirements")"
    # Compiled once here, so that the first start is as quick as every other.
    .venv/bin/python -m compileall -q app.py ui runs presets monitor guards >&2 || true
}
