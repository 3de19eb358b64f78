#!/usr/bin/env bash
# {{ title }}
# Written from run.toml. Run it without the monitor: bash train.sh
# Run it with the monitor, which restarts it after a hang: python -m monitor run {{ job.slug }}
{% for text in comments %}
# {{ text }}
{% endfor %}
set -eu
cd {{ root|word }}
export PYTHONPATH={{ root|word }}"${PYTHONPATH:+:$PYTHONPATH}"
{% for name, value in job.environment.items() %}
export {{ name }}={{ value|word }}
{% endfor %}
{{ secrets }}
{%- if job.spec.nodes > 1 %}
{% for name, message in no_node.items() %}
[ -n "{{ "${%s:-}"|format(name) }}" ] || { echo {{ message|word }} >&2; exit 2; }
{% endfor %}
{% endif %}
{% if job.launch %}

launcher=${ACCELERATE:-}
if [ -z "$launcher" ] && [ -x {{ launcher|word }} ]; then launcher={{ launcher|word }}; fi
if [ -z "$launcher" ]; then
  launcher=$(command -v accelerate) || { echo {{ no_launcher|word }} >&2; exit 127; }
fi
{% endif %}
{% if not job.launch or before %}

python=${TRAINER_PYTHON:-}
{% if not job.launch %}
if [ -z "$python" ] && [ -n "${ACCELERATE:-}" ]; then python=$(dirname -- "$(command -v -- "$ACCELERATE")")/python; fi
{% else %}
if [ -z "$python" ] && [ -x "${launcher%/*}/python" ]; then python=${launcher%/*}/python; fi
{% endif %}
if [ -z "$python" ] && [ -x {{ python|word }} ]; then python={{ python|word }}; fi
if [ -z "$python" ]; then
  python=$(command -v python3) || { echo {{ no_python|word }} >&2; exit 127; }
fi
{% endif %}
{% if job.save_dir %}
# The trainer writes to a local folder. When this script ends, also after an error, the results are copied to the run's
# folder. Each is copied under a hidden name and renamed when it is complete: an interrupted copy leaves no truncated file.
(umask 077 && mkdir -p -- {{ job.save_dir|word }})
copy_into() {
  local item name part old failed=0
  mkdir -p -- "$2" || return 1
  for item in "$1"/*; do
    [ -e "$item" ] || continue
    name=${item##*/}
    if [ -d "$item" ] && [ "$name" = "${name%-state}" ]; then
      copy_into "$item" "$2/$name" || failed=1
      continue
    fi
    part=$2/.$name.$$.tmp old=$2/.$name.$$.old
    rm -rf -- "$2/.$name".*.tmp
    if cp -R -- "$item" "$part" && { [ -d "$part" ] || sync -- "$part"; } &&
      { [ ! -d "$2/$name" ] || mv -- "$2/$name" "$old"; } && mv -- "$part" "$2/$name"; then
      rm -rf -- "$old"
    else
      failed=1
      rm -rf -- "$part"
      [ ! -d "$old" ] || [ -e "$2/$name" ] || mv -- "$old" "$2/$name"
    fi
  done
  return "$failed"
}
copy_results() {
  local code=$?
  copy_into {{ job.save_dir|word }} {{ job.places.run|word }} && return
  echo {{ not_copied|word }} >&2
  [ "$code" -ne 0 ] || exit 1
}
trap copy_results EXIT
{% endif %}
{% for what, lines in before %}

# {{ what }}
"$python" {{ lines|command }}
{% endfor %}

{% if before %}
# Trains.
{% endif %}
{# exec would replace the shell, and its trap would never run #}
{{ "" if job.save_dir else "exec " }}"{{ "$launcher" if job.launch else "$python" }}" {{ lines|command }}
