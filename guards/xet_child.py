"""Downloads one file with the hub's own library, and so with xet, for guards/xet.py, which watches and kills it.

A process of its own, because a stalled xet transfer ends only with its process. It reads one JSON line from standard input,
the arguments of `hf_hub_download`: a token in the arguments or the environment could be read by others. It exits when its
parent has died, which closes standard input.
"""

import json
import os
import sys
import threading


def main() -> None:
    """Download the file that standard input names."""
    os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1")
    job = json.loads(sys.stdin.buffer.readline())

    def exit_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    from huggingface_hub import hf_hub_download

    hf_hub_download(**job)


if __name__ == "__main__":
    del sys.path[0]  # guards/, whose modules are not meant to be found by bare names
    main()
    sys.stdout.flush()
    os._exit(0)  # the reading thread would hold the exit
