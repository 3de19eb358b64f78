# Starts the monitor and sleeps until it ends; one that was killed or failed is left to keeper.py, which this process becomes.
#   keeper.sh PYTHON STATE FOLDER OPTION…
# A shell, because it sleeps as long as the training lasts: it takes a tenth of the memory of a Python that does the same.
python=$1 state=$2 folder=$3
shift 3
received= child=
forward() {
  received="$received --received=$1"
  [ -z "$child" ] || kill -s "$2" "$child" 2>/dev/null
}
trap 'forward 15 TERM' TERM
trap 'forward 2 INT' INT
trap '' HUP
# shellcheck disable=SC2086
"$python" -m monitor run --child "$$" "$@" $received "$folder" &
child=$!
while :; do
  wait "$child"
  code=$?
  kill -0 "$child" 2>/dev/null || break # else a signal woke `wait`
done
# 70 is EXIT_ERROR of keeper.py, above 128 a signal killed it; 130 is also how it ends after an early Ctrl-C.
if [ "$code" -eq 130 ] || { [ "$code" -ne 70 ] && [ "$code" -le 128 ]; }; then
  exit "$code"
fi
# shellcheck disable=SC2086
exec "$python" -m monitor run --keep "--ended=$code" "$@" $received "$state" "$folder"
