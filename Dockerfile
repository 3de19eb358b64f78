# Hangproof in a container: the page, the monitor and the built-in trainer; kohya's trainers with
#   docker build --build-arg TRAINERS="sd-scripts musubi" -t hangproof .
# PyTorch's wheels bring CUDA's libraries along (13.0 in PyTorch 2.13; launch/travel.py asks for machines whose driver has it), so the
# base image only has to make the driver's libraries reachable.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 PYTHONUTF8=1 LANG=C.UTF-8

# The distribution deletes old versions from its archive, so a pinned version would break the build within weeks.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl git python3 python3-venv tini \
 && rm -rf /var/lib/apt/lists/*

# The user that everything runs as. Its number is free in the base image, and the same on every machine that shares a volume.
# A volume that only root can write (some rented machines) needs --build-arg USER_ID=0.
ARG USER_ID=10001
RUN { [ "$USER_ID" = 0 ] || useradd --create-home --no-log-init --uid "$USER_ID" hangproof; } \
 && install -d -o "$USER_ID" -g "$USER_ID" /hangproof /data
USER ${USER_ID}
WORKDIR /hangproof

# First what changes rarely: this layer is built again only when a pin changes.
COPY --chown=${USER_ID}:${USER_ID} setup.sh requirements.txt ./
RUN . ./setup.sh && set_up requirements.txt && rm -rf ~/.cache/pip

COPY --chown=${USER_ID}:${USER_ID} . .
ARG TRAINERS=""
RUN for trainer in $TRAINERS; do ./start.sh "$trainer"; done \
 && .venv/bin/python -m compileall -q app.py captions guards jobs launch monitor presets runs trainer ui \
 && rm -rf ~/.cache/pip

# Runs, data sets and models are one volume.
ENV HANGPROOF_DATA=/data
VOLUME /data
EXPOSE 7860
# The token goes through a pipe: arguments show in the list of processes.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
  CMD ["/bin/bash", "-c", "set -o pipefail; token=\"${XDG_CONFIG_HOME:-$HOME/.config}/hangproof/token\"; \
    printf 'Authorization: Bearer %s' \"$(cat \"$token\")\" \
    | curl --fail --silent --show-error --max-time 8 --header @- http://127.0.0.1:7860/healthz"]
# SIGTERM saves every run within 30 s: give `docker stop` more than that (compose.yaml: stop_grace_period).
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--", "/hangproof/.venv/bin/python", "-m", "launch"]
CMD ["serve"]
