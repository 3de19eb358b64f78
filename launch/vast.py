"""`python -m launch vast RUN`: an instance of Vast.ai with the image, which trains the run and then stops itself.

The file holds the two requests of Vast's API (docs.vast.ai/api-reference): the search for offers, and the acceptance of one.
With an SSH run type Vast replaces the image's entry point by its own, as root, and runs `onstart` at each start of the
instance; so `onstart` starts our entry point as the image's user. It may have 4,048 characters. Variables of the account (console,
Account, Environment Variables) are set in each container: the place for secrets. --bid rents an interruptible instance: when
somebody bids more, its processes are killed and its data stays on that host, so the store matters most there.
"""

import argparse
from typing import TYPE_CHECKING, Any

import runs
from launch import common, gpus, travel
from launch.cloud_api import Api, ApiError, entries, key_of, rent
from launch.common import LaunchError
from launch.pods import address

if TYPE_CHECKING:
    from runs.spec import RunSpec

FILE = "vast.json"
KEY = "VAST_API_KEY"
KEYS = "https://cloud.vast.ai/manage-keys/"
MOST_ONSTART = 4048  # characters; docs.vast.ai/api-reference, "Key Quirks"
OFFERS = 10
# /etc/environment: else the sessions of SSH see none of the variables. It holds the secrets of the account, so only root may read
# it, and each start replaces what the one before wrote. Vast has no init of ours, so tini reaps here.
ONSTART = """\
set -eu
known=/etc/environment
(
  umask 077
  touch "$known" && {
    sed '/^# hangproof$/,/^# end of hangproof$/d' "$known" && echo '# hangproof' &&
    env | grep '^[A-Za-z][A-Za-z0-9]*_[A-Za-z0-9_]*=' | sort && echo '# end of hangproof'
  } > "$known.new" && mv -- "$known.new" "$known"
) || echo "hangproof: $known cannot be written; sessions of SSH do not have the variables of this container" >&2
export HANGPROOF_ALLOWED_HOSTS="${PUBLIC_IPADDR:-}"
mkdir -p "$HANGPROOF_DATA" "$HF_HOME"
as=""
if id hangproof >/dev/null 2>&1; then
  chown hangproof "$HANGPROOF_DATA" "$HF_HOME"
  as="runuser -u hangproof -- env HOME=/home/hangproof"
fi
cd /hangproof
nohup $as /usr/bin/tini -s -- .venv/bin/python -m launch serve >> "$HANGPROOF_DATA/container.log" 2>&1 &
"""


def search(spec: "RunSpec", args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """The request that finds offers, the cheapest first."""
    return {
        "gpu_name": {"in": names},
        "num_gpus": {"eq": spec.gpus},
        "gpu_ram": {"gte": int(gpus.needed_gb(spec) * 1000)},  # MB
        "disk_space": {"gte": args.disk},
        "cuda_max_good": {"gte": float(travel.CUDA)},
        "reliability": {"gte": 0.98},
        "verified": {"eq": True},
        "rentable": {"eq": True},
        "type": "bid" if args.bid else "ondemand",
        "order": [["dph_total", "asc"]],
        "limit": OFFERS,
    }


def body(spec: "RunSpec", args: argparse.Namespace) -> dict[str, Any]:
    """The request that accepts an offer. Raises LaunchError: no store, or `onstart` is too long."""
    variables = {
        "HANGPROOF_DATA": "/workspace/hangproof",
        "HF_HOME": "/workspace/cache",
        "HANGPROOF_START_RUN": spec.slug,
        "HANGPROOF_START_STORE": travel.address(spec),
        "HANGPROOF_STOP_POD": args.stop,
        **travel.variables(spec, args),
    }
    found: dict[str, Any] = {
        "image": args.image,
        "label": travel.name_there(spec),
        "disk": args.disk,
        "runtype": "ssh_direct",
        "user": "root",  # Vast's own entry point needs it
        "target_state": "running",
        "cancel_unavail": True,
        "env": {**{name: value for name, value in variables.items() if value}, "-p 7860:7860": "1"},
        "onstart": checked(ONSTART),
    }
    if args.volume:
        found["volume_info"] = {"create_new": False, "volume_id": args.volume, "mount_path": "/workspace"}
    return found | ({"price": args.bid} if args.bid else {})


def checked(onstart: str) -> str:
    """The script. Raises LaunchError: Vast does not take it."""
    if len(onstart) > MOST_ONSTART:
        raise LaunchError(f"onstart has {len(onstart)} characters, and Vast.ai takes {MOST_ONSTART}; shorten it")
    return onstart


def create(api: Api, spec: "RunSpec", args: argparse.Namespace, names: list[str]) -> tuple[str, dict[str, Any]]:
    """(number of the instance, the offer): the cheapest that is still there.

    Raises:
        LaunchError: there is none.
    """
    offers = api.call("POST", "/api/v0/bundles/", search(spec, args, names)).get("offers") or []
    gone: ApiError | None = None
    label = travel.unique_name(spec)

    def find() -> dict[str, Any] | None:
        rows = entries(api.call("GET", "/api/v0/instances/?owner=me"))
        return next(
            ({"success": True, "new_contract": row.get("id")} for row in rows if row.get("label") == label), None
        )

    request = {**body(spec, args), "label": label}
    for offer in offers:
        try:
            answer = rent(api, "PUT", f"/api/v0/asks/{int(offer['id'])}/", request, label, find)
        except ApiError as error:  # somebody else was faster
            if error.status not in (404, 410):
                raise
            gone = error
            continue
        if answer.get("success") is True and answer.get("new_contract"):
            return str(answer["new_contract"]), offer
        gone = ApiError(f"Vast.ai: {answer.get('msg') or answer.get('error') or answer}")
    why = f" ({gone})" if gone else ""
    raise LaunchError(
        f"Vast.ai has no offer now for {', '.join(names)} with {args.disk} GB of disk{why}; try again later, or name a GPU with --gpu"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN and options."""
    common.add_run(parser)
    travel.add_arguments(parser)
    travel.add_image(parser)
    parser.add_argument(
        "--volume", type=int, default=0, metavar="ID", help="a volume of the same host; without it, the instance's disk"
    )
    parser.add_argument(
        "--bid", type=float, default=0.0, metavar="USD", help="price an hour of an interruptible instance"
    )


def run(args: argparse.Namespace) -> int:
    """Write vast.json; with --submit, copy the run into its store and rent an instance."""
    folder = common.find(args)
    spec = runs.load(folder)
    travel.one_machine(spec, "Vast.ai")
    names = gpus.names(spec, "vast", args.gpu)
    if not names:
        raise LaunchError(f"{spec.model} trains on a CPU; rent a GPU for it with --gpu NAME, or train it here")
    requests = {"search": search(spec, args, names), "create": body(spec, args)}
    path = travel.write(folder / FILE, travel.to_json(requests))
    instance, offer = "", dict[str, Any]()
    if args.submit:
        api = Api("Vast.ai", address("vast"), key_of(KEY, KEYS))
        print(travel.upload(folder, travel.address(spec)))
        instance, offer = create(api, spec, args, names)
    secrets = ["HANGPROOF_AUTH", *travel.secrets(spec, args)]
    if instance:
        said = f"instance {instance}: {offer.get('gpu_name', '')}, {offer.get('dph_total', '?')} USD an hour"
    else:
        said = f"{path}\nSet these variables in Vast.ai's console first (Account, Environment Variables): {', '.join(secrets)}"
    value = {
        "file": str(path),
        "secrets": secrets,
        "gpus": names,
        "submitted": args.submit,
        "instance": instance or None,
    }
    return common.report(args, said, value)
