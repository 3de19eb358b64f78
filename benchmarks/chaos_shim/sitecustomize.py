"""Makes one call of the monitor fail. Python imports this at its start, from the first folder of PYTHONPATH.

Decision: the monitor has no hook for this. Before any of its modules is imported, every built-in function of the
modules through which a Python program reaches the operating system is replaced by a wrapper; so are `open` and the
methods of the files that it returns, and of sockets. What is wrapped is found by walking those modules.

A place is (function, file and line of the innermost calling frame in monitor/ or guards/). Calls from the import
machinery are left alone. Only the process that watches is changed: not its helpers, not the training.

    CHAOS_ROOT      the checkout whose monitor/ and guards/ count
    CHAOS_FOLDER    for places-PID.jsonl (one line when a place is new or its number of calls doubles) and `fired`
    CHAOS_LEDGER    the training has started once this file exists
    CHAOS_FAULT     JSON {"place": [function, file, line], "errno": n, "for_s": s, "call": n, "from_start": bool};
                    without it the places are recorded
"""

import sys


def _install():
    import _io
    import _posixsubprocess
    import _pyio
    import _signal
    import _socket
    import builtins
    import fcntl
    import io
    import json
    import mmap
    import os
    import select
    import time
    import types

    # They cannot fail, or do not leave the process, or do not return. Everything else counts. (So is a file's
    # `tell`: every buffer calls it when it is made, and Python itself ignores its error.)
    pure = {
        "os": "fspath strerror major minor makedev register_at_fork _exit abort getpid getppid getuid geteuid getgid getegid "
        "umask cpu_count waitstatus_to_exitcode device_encoding WCOREDUMP WIFCONTINUED WIFSTOPPED WIFSIGNALED WIFEXITED "
        "WEXITSTATUS WTERMSIG WSTOPSIG sysconf",
        "time": "monotonic gmtime localtime asctime ctime mktime strftime strptime tzset get_clock_info",
        "signal": "valid_signals strsignal default_int_handler",
        "socket": "ntohs ntohl htons htonl inet_aton inet_ntoa inet_pton inet_ntop CMSG_LEN CMSG_SPACE fileno gettimeout "
        "getblocking",
        "file": "fileno readable writable seekable tell isatty",
    }
    root, folder = os.environ["CHAOS_ROOT"].rstrip("/"), os.environ["CHAOS_FOLDER"]
    fault = json.loads(os.environ.get("CHAOS_FAULT") or "null")
    target = tuple(fault["place"]) if fault else None
    codes, counts = {}, {}
    state = {"started": False, "looked_s": -1.0, "until_s": None, "calls": 0}
    project = (f"{root}/monitor/", f"{root}/guards/")
    # What this file itself calls is not wrapped.
    real_open, stat, monotonic, strerror, get_frame = io.open, os.stat, time.monotonic, os.strerror, sys._getframe

    def append(name, record):
        with real_open(f"{folder}/{name}", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def exists(path):
        try:
            stat(path)
        except OSError:
            return False
        return True

    def started():
        if not state["started"]:
            now_s = monotonic()
            if now_s - state["looked_s"] > 0.02:
                state["looked_s"] = now_s
                state["started"] = exists(os.environ["CHAOS_LEDGER"])
        return state["started"]

    def kind_of(file):
        if file.startswith(project):
            return file[len(root) + 1 :]
        return "import" if file.startswith("<frozen importlib") else "other"

    def place_of(name):
        """The place of this call, or None."""
        frame = get_frame(2)
        while frame is not None:
            code = frame.f_code
            kind = codes.get(code) or codes.setdefault(code, kind_of(code.co_filename))
            if kind != "other":
                return None if kind == "import" else (name, kind, frame.f_lineno)
            frame = frame.f_back
        return None

    def record(place):
        key = (place, started())
        number = counts[key] = counts.get(key, 0) + 1
        if number & (number - 1) == 0:
            append(f"places-{os.getpid()}.jsonl", {"place": place, "started": key[1], "calls": number})

    def fails_now():
        """Is this call of the target the one that fails?"""
        if state["until_s"] is not None:
            return monotonic() < state["until_s"]
        if not fault["from_start"] and not started():
            return False
        state["calls"] += 1
        if state["calls"] < fault["call"]:
            return False
        if exists(f"{folder}/fired"):  # by the monitor that this one replaces
            with real_open(f"{folder}/fired", "rb") as file:
                state["until_s"] = json.loads(file.readline())["t"] + fault["for_s"]
            return fault["for_s"] > 0 and monotonic() < state["until_s"]
        state["until_s"] = monotonic() + fault["for_s"]
        append("fired", {"t": monotonic()})
        return True

    def check(name):
        """Called by each wrapper first. The error to raise, or None."""
        place = place_of(name)
        if place is not None and target is None:
            record(place)
        elif place is not None and place == target and fails_now():
            return OSError(fault["errno"], f"{strerror(fault['errno'])} (chaos)")
        return None

    def wrapped(name, function):
        releases = name.rpartition(".")[2] == "close"  # close(2) releases the descriptor even where it fails

        def call(*args, **kwargs):
            error = check(name)
            if error is not None:
                if releases:
                    function(*args, **kwargs)
                raise error
            return function(*args, **kwargs)

        call.__name__ = call.__qualname__ = getattr(function, "__name__", name)
        call.__doc__ = function.__doc__
        return call

    def wrap_module(label, *modules):
        """Replace the module's built-in functions, in every namespace that has the same ones."""
        left_alone = set(pure.get(label, "").split())
        made = {}
        for module in modules:
            for name, value in list(vars(module).items()):
                built_in = isinstance(value, types.BuiltinFunctionType)
                if built_in and name not in left_alone and not name.startswith("__"):
                    if value not in made:
                        made[value] = wrapped(f"{label}.{name}", value)
                    setattr(module, name, made[value])
        return made

    def methods(label, base):
        """A subclass of a built-in type, with no __weakref__ more; its methods that reach the system call `check`."""
        left_alone = pure[label].split()
        names = [n for n, v in vars(base).items() if callable(v) and not n.startswith("_") and n not in left_alone]
        changed = {name: wrapped(f"{label}.{name}", getattr(base, name)) for name in names}
        return type(base.__name__, (base,), {**changed, "__module__": base.__module__, "__slots__": ()})

    def chaos_open(*args, **kwargs):
        error = check("open")
        if error is not None:
            raise error
        return (real_open if place_of("open") is None else _pyio.open)(*args, **kwargs)

    # _pyio.open is io.open in Python: with io's own buffers on a raw file whose methods are wrapped.
    _pyio.FileIO = methods("file", _io.FileIO)
    for name in ("BufferedRandom", "BufferedReader", "BufferedWriter", "TextIOWrapper"):
        setattr(_pyio, name, getattr(io, name))
    made = wrap_module("os", os)
    for name in ("supports_dir_fd", "supports_effective_ids", "supports_fd", "supports_follow_symlinks"):
        known = getattr(os, name)
        known |= {made[function] for function in list(known) if function in made}
    wrap_module("time", time)
    wrap_module("signal", _signal, *([sys.modules["signal"]] if "signal" in sys.modules else []))
    for label, module in (("fcntl", fcntl), ("select", select), ("process", _posixsubprocess), ("socket", _socket)):
        wrap_module(label, module)
    _socket.socket = methods("socket", _socket.socket)
    mmap.mmap = type("mmap", (mmap.mmap,), {"__new__": wrapped("mmap", mmap.mmap.__new__), "__module__": "mmap"})
    io.open = builtins.open = _io.open = chaos_open
    for name, handle in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None:
            buffering = 1 if stream.line_buffering else -1
            out = _pyio.open(handle, "w", buffering, stream.encoding, stream.errors, closefd=False)
            setattr(sys, name, out)
            setattr(sys, f"__{name}__", out)


if any(sys.orig_argv[i : i + 3] == ["-m", "monitor", "run"] for i in range(len(sys.orig_argv))):
    _install()
