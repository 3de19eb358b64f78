# Secrets ({{ names|join(", ") }}): their values are in a file that only its owner can read, and not here.
env_file={{ path|word }}
if [ -r "$env_file" ]; then . "$env_file"; fi
for name in {{ names|join(" ") }}; do
  [ -n "${!name:-}" ] || echo "train.sh: $name has no value: set it in the environment, or in $env_file" >&2
done
