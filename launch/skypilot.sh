set -eu
cd @ROOT@
export HANGPROOF_DATA=@DATA@
#[environment
if ! python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
  python3 -m pip install --quiet uv==0.13.9
  python3 -m uv python install 3.12
  export PYTHON="$(python3 -m uv python find 3.12)"
fi
. ./setup.sh
set_up requirements.txt
#]
#[trainer
./start.sh @TRAINER@
#]
#[model
.venv/bin/python -m runs fetch-model @MODEL@
#]
#[nodes
export HANGPROOF_NODE="$SKYPILOT_NODE_RANK" HANGPROOF_MAIN_PORT=29400
HANGPROOF_MAIN_ADDRESS="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"
export HANGPROOF_MAIN_ADDRESS
rm -rf -- "$HANGPROOF_DATA"/outputs/@NAME@
#]
#[run
for pause in 30 60 120 240 450 0; do # as long as a run waits for its store
  .venv/bin/python -m launch store restore @STORE@ @NAME@ && break
  [ "$pause" != 0 ] || exit 1
  sleep "$pause"
done
# The machine is deleted at the end. So a store that fails then has four hours for the last files, and not 15 minutes.
export HANGPROOF_LIMITS="$HANGPROOF_DATA/limits.toml"
echo 'store.flush_s = 14400' > "$HANGPROOF_LIMITS"
exec .venv/bin/python -m monitor run @NAME@
#]
