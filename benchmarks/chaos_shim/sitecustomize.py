"""Makes one call of the monitor fail. Python imports this at its start, from the first folder of PYTHONPATH.

Decision: the monitor has no hook for this. Before any of its modules is imported, every built-in function of the
modules through which a Python program reaches the operating system is replaced by a wrapper; so are `open`, the
methods of the files that it returns, of sockets and of directory listings. What is wrapped is found by walking those
modules.

A place is (function, file and line of the innermost calling frame in monitor/ or guards/). Calls from the import
machinery are left alone. Only the process that watches is changed: not its helpers, not the training.

    CHAOS_ROOT      the checkout whose monitor/ and guards/ count
    CHAOS_FOLDER    for places-PID.jsonl (one line when a place is new or its number of calls doubles) and `fired`
    CHAOS_LEDGER    the training has started once this file exists
    CHAOS_FAULT     JSON {"place": [function, file, line], "errno": n, "for_s": s, "call": n, "from_start": bool};
                    without it the places are recorded
"""

import sys


def _watches(argv):
    """Is this process `python -m monitor run …`?"""
    return any(argv[i : i + 3] == ["-m", "monitor", "run"] for i in range(len(argv)))


def _install():
    import _io
    import _posixsubprocess
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
        "WEXITSTATUS WTERMSIG WSTOPSIG",
        "time": "gmtime localtime asctime ctime mktime strftime strptime tzset get_clock_info",
        "signal": "valid_signals strsignal default_int_handler",
        "socket": "ntohs ntohl htons htonl inet_aton inet_ntoa inet_pton inet_ntop CMSG_LEN CMSG_SPACE",
    }
    root = os.environ["CHAOS_ROOT"].rstrip("/")
    folder = os.environ["CHAOS_FOLDER"]
    ledger = os.environ["CHAOS_LEDGER"]
    fault = json.loads(os.environ.get("CHAOS_FAULT") or "null")
    target = tuple(fault["place"]) if fault else None
    fired_file = f"{folder}/fired"
    codes, counts = {}, {}
    real_open, real_stat, monotonic, get_frame = os.open, os.stat, time.monotonic, sys._getframe
    write, close = os.write, os.close
    strerror = os.strerror
    state = {"started": False, "looked_s": -1.0, "until_s": None, "calls": 0}
    project = (f"{root}/monitor/", f"{root}/guards/")

    def append(name, record):
        handle = real_open(f"{folder}/{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        write(handle, (json.dumps(record) + "\n").encode())
        close(handle)

    def exists(path):
        try:
            real_stat(path)
        except OSError:
            return False
        return True

    def started():
        if not state["started"]:
            now_s = monotonic()
            if now_s - state["looked_s"] > 0.02:
                state["looked_s"] = now_s
                state["started"] = exists(ledger)
        return state["started"]

    def place_of(name):
        """The place of this call, or None."""
        frame = get_frame(2)
        while frame is not None:
            code = frame.f_code
            kind = codes.get(code)
            if kind is None:
                file = code.co_filename
                kind = "other"
                if file.startswith(project):
                    kind = file[len(root) + 1 :]
                elif file.startswith("<frozen importlib"):
                    kind = "import"
                codes[code] = kind
            if kind == "import":
                return None
            if kind != "other":
                return name, kind, frame.f_lineno
            frame = frame.f_back
        return None

    def record(place):
        key = (place, started())
        number = counts[key] = counts.get(key, 0) + 1
        if number & (number - 1) == 0:
            line = {"place": place, "started": key[1], "calls": number, "t": monotonic(), "pid": os.getpid()}
            append(f"places-{os.getpid()}.jsonl", line)

    def fails_now(place):
        """Is this the call that fails?"""
        if place != target:
            return False
        if state["until_s"] is not None:
            return monotonic() < state["until_s"]
        if not fault["from_start"] and not started():
            return False
        state["calls"] += 1
        if state["calls"] < fault["call"]:
            return False
        if exists(fired_file):  # by the monitor that this one replaces
            with real_file(fired_file, "rb") as file:
                state["until_s"] = json.loads(file.readline())["t"] + fault["for_s"]
            return fault["for_s"] > 0 and monotonic() < state["until_s"]
        state["until_s"] = monotonic() + fault["for_s"]
        append("fired", {"place": place, "t": monotonic(), "pid": os.getpid()})
        return True

    def check(name):
        """Called by each wrapper first. The error to raise, or None."""
        place = place_of(name)
        if place is None:
            return None
        if target is None:
            record(place)
            return None
        if fails_now(place):
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
        call.__wrapped__ = function
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

    def methods(label, base, pure_methods):
        """A subclass of a built-in type whose own methods that reach the operating system go through `check`."""
        names = [n for n, v in vars(base).items() if callable(v) and not n.startswith("_") and n not in pure_methods]
        changed = {name: wrapped(f"{label}.{name}", getattr(base, name)) for name in names}
        return type(base.__name__, (base,), {**changed, "__module__": base.__module__})

    real_file = io.open
    file_type = methods("file", _io.FileIO, {"fileno", "readable", "writable", "seekable", "tell"})

    def chaos_open(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        error = check("open")
        if error is not None:
            raise error
        if place_of("open") is None or not isinstance(mode, str):
            return real_file(file, mode, buffering, encoding, errors, newline, closefd, opener)
        # What io.open does, on a raw file of the type above.
        kinds = set(mode)
        binary, updating = "b" in kinds, "+" in kinds
        raw_mode = "".join(c for c in mode if c in "rwxa+")
        raw = file_type(file, raw_mode, closefd, opener)
        if buffering == 0 and binary:
            return raw
        line_buffering = buffering == 1 and not binary
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        try:
            if updating:
                buffer = io.BufferedRandom(raw, size)
            elif kinds & set("wxa"):
                buffer = io.BufferedWriter(raw, size)
            else:
                buffer = io.BufferedReader(raw, size)
            if binary:
                return buffer
            text = io.TextIOWrapper(buffer, io.text_encoding(encoding), errors, newline, line_buffering)
            text.mode = mode
            return text
        except BaseException:
            raw.close()
            raise

    class Listing:
        """What os.scandir returns; the reading of the folder goes through `check` too."""

        def __init__(self, found):
            self.close = found.close
            self._next = wrapped("os.scandir.next", found.__next__)

        def __iter__(self):
            return self

        def __next__(self):
            return self._next()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.close()

    made = wrap_module("os", os)
    scandir = os.scandir
    made[scandir.__wrapped__] = os.scandir = lambda path=".": Listing(scandir(path))
    for name in ("supports_dir_fd", "supports_effective_ids", "supports_fd", "supports_follow_symlinks"):
        known = getattr(os, name)
        known |= {made[function] for function in list(known) if function in made}
    wrap_module("time", time)
    wrap_module("signal", _signal, *([sys.modules["signal"]] if "signal" in sys.modules else []))
    wrap_module("fcntl", fcntl)
    wrap_module("select", select)
    wrap_module("process", _posixsubprocess)
    wrap_module("socket", _socket)
    _socket.socket = methods("socket", _socket.socket, {"fileno", "gettimeout", "getblocking"})
    mmap.mmap = type("mmap", (mmap.mmap,), {"__new__": wrapped("mmap", mmap.mmap.__new__), "__module__": "mmap"})
    io.open = builtins.open = _io.open = chaos_open
    for name, handle in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None:
            raw = file_type(handle, "w", closefd=False)
            raw.name = f"<{name}>"
            out = io.TextIOWrapper(
                io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=stream.line_buffering
            )
            out.mode = "w"
            setattr(sys, name, out)
            setattr(sys, f"__{name}__", out)


if _watches(sys.orig_argv):
    _install()
