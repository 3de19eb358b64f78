"""The walk of a hang: which functions of monitor/ are entered, in order, from the first suspicion to the restart.

`python tests/support/monitor_walk.py FOLDER` supervises the toy run in FOLDER, which hangs once, and prints the walk as JSON: every
function that `supervisor.py` or `recovery.py` calls in another file, and their own, as "file:function", in the order of the
first entry. What those call beneath (reading /proc, writing a file) is theirs alone.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
MONITOR = f"{ROOT}/monitor/"
CALLERS = ("supervisor.py", "recovery.py")
# What every turn of the loop does, hang or not.
EVERY_TURN = (
    "handle_requests",
    "stop_request",
    "write_status",
    "poll_s",
    "write",
    "sleep",
    "now",
    "listen",
    "note_phase",
)


def main(folder: Path) -> None:
    from monitor.supervisor import supervise

    walk: list[str] = []
    state = {"walking": False, "done": False}

    def entered(frame, event, _arg):
        if event != "call" or state["done"]:
            return
        code, caller = frame.f_code, frame.f_back
        if not code.co_filename.startswith(MONITOR) or code.co_name.startswith(("<", "__")):
            return
        file = code.co_filename.removeprefix(MONITOR)
        if file == "supervisor.py" and code.co_name == "suspect":
            state["walking"] = True
        by = caller.f_code.co_filename.removeprefix(MONITOR) if caller else ""
        step = f"{file}:{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"
        if (
            state["walking"]
            and (file in CALLERS or by in CALLERS)
            and code.co_name not in EVERY_TURN
            and step not in walk
        ):
            walk.append(step)
        if state["walking"] and step.endswith("attach"):
            state["done"] = True

    sys.setprofile(entered)
    supervise(folder, False, False, None, False, ())
    sys.setprofile(None)
    print(json.dumps(walk))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
