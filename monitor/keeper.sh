# Starts the monitor and sleeps until it ends; one that was killed, failed or is silent is left to keeper.py, which this
# process becomes.
#   bash keeper.sh PYTHON STATE FOLDER SILENT_S READER WRITER OPTION…      READER and WRITER: the pipe of the monitor's beat
# A shell, because it sleeps as long as the training lasts: it takes a tenth of the memory of a Python that does the same.
set -o posix # a signal ends `read`
python=$1 state=$2 folder=$3 silent_s=$4 reader=$5 writer=$6
shift 6
received= child=
forward() {
  received="$received --received=$1"
  [ -z "$child" ] || kill -s "$2" "$child" 2>/dev/null
}
trap 'forward 15 TERM' TERM
trap 'forward 2 INT' INT
trap '' HUP
# shellcheck disable=SC2086
"$python" -m monitor run --child "$$" "--beat=$writer" "$@" $received "$folder" &
child=$!
exec {writer}>&-
# Silent twice: after the first time the monitor gets a moment, because both may have been stopped, or the whole machine.
silent=
while :; do
  read -r -n 1 -t "${silent:-$silent_s}" -u "$reader" _
  code=$?
  if [ "$code" -eq 0 ]; then
    silent=
  elif [ "$code" -eq 1 ]; then # the end of the pipe
    break
  elif [ "$code" -eq 142 ] && [ -z "$silent" ]; then
    silent=6 # CONFIRM_S of keeper.py
  elif [ "$code" -eq 142 ]; then
    # shellcheck disable=SC2086
    exec "$python" -m monitor run --keep "--silent=$child" "--beats=$reader" "--silent-s=$silent_s" \
      "$@" $received "$state" "$folder"
  fi
done
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
exec "$python" -m monitor run --keep "--ended=$code" "--silent-s=$silent_s" "$@" $received "$state" "$folder"
