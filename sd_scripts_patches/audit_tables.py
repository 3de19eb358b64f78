"""The tables of `audit`: which calls wait, which guard bounds which wait, and which scripts a preset starts.

They are Python literals and not TOML because the audit also runs in a trainer's environment, and Python 3.10 has no TOML
reader. Names are qualified as Python resolves them (`from concurrent.futures import wait as w` is `concurrent.futures.wait`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = {
    "future": "the result of a pool's task, or a pool that waits for its tasks",
    "queue": "an entry of a queue, or room in it",
    "thread": "a thread or a process to end",
    "event": "an event, a condition or a barrier between threads",
    "lock": "a lock, a semaphore or a file lock",
    "dataloader": "a batch of a data loader",
    "collective": "the other ranks",
    "http": "a server",
    "hub": "the model hub",
    "subprocess": "a program",
    "stream": "a CUDA stream or event",
    "file": "a file to be read",
    "save": "a file to be written, moved or removed",
    "polling": "a loop that asks again until something has happened",
    "socket": "a socket or a connection",
    "select": "one of several sockets or connections",
    "input": "a person, or standard input",
    "tracker": "an experiment tracker",
    "async": "a coroutine",
    "signal": "a signal",
    "server": "a loop that serves until it is stopped",
    "sampling": "the denoising steps of a sample image",
    "exit": "threads that the interpreter joins when the process exits",
    "sync": "something that the name of the call says (a call unknown to the tables)",
}
"""Kind of a wait → what it waits for."""

NEVER = -1
"""The call takes no timeout by position."""


@dataclass(frozen=True)
class Call:
    """A call that waits. at: the position of its timeout, `self` not counted; NEVER when it has none by position.

    default: the call has a limit of its own when none is given; this says which.
    """

    kind: str
    at: int = NEVER
    default: str = ""


def _words(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _types(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def _calls(kind: str, names: str, at: int = NEVER, default: str = "") -> dict[str, Call]:
    return {name: Call(kind, at, default) for name in names.split()}


TIMEOUT_WORDS = _words(
    "timeout timeout_s timeout_seconds timeout_ms time_limit max_wait wait_timeout timeout_sec read_timeout"
)
"""Keywords that limit a wait; None does not."""
NON_BLOCKING = _words("block blocking wait")
"""Keywords which, when False, make a call return at once."""

FUNCTIONS: dict[str, Call] = {
    **_calls("future", "concurrent.futures.wait concurrent.futures.as_completed", 1),
    **_calls("future", "torch.futures.wait_all torch.jit.wait"),
    **_calls("thread", "os.wait os.waitpid os.waitid os.wait3 os.wait4 torch.multiprocessing.spawn"),
    **_calls("lock", "fcntl.flock fcntl.lockf msvcrt.locking portalocker.lock os.lockf"),
    **_calls("http", "urllib.request.urlopen", 2),
    **_calls("http", "urllib.request.urlretrieve torch.hub.download_url_to_file torch.hub.load_state_dict_from_url"),
    **_calls("http", "torch.hub.load wget.download gdown.download timm.create_model", NEVER),
    **_calls("http", "httpx.get httpx.post httpx.put httpx.delete httpx.head httpx.request", NEVER, "httpx: 5 s"),
    **{f"requests.{verb}": Call("http") for verb in ("get", "post", "put", "patch", "delete", "head", "request")},
    **_calls("subprocess", "subprocess.run subprocess.call subprocess.check_call subprocess.check_output"),
    **_calls("subprocess", "subprocess.getoutput subprocess.getstatusoutput os.system os.popen pty.spawn"),
    **_calls("stream", "torch.cuda.synchronize torch.xpu.synchronize torch.mps.synchronize torch.npu.synchronize"),
    **_calls("stream", "torch.cpu.synchronize torch.accelerator.synchronize"),
    **_calls("file", "numpy.load numpy.memmap numpy.fromfile numpy.loadtxt numpy.genfromtxt torch.load torch.jit.load"),
    **_calls("file", "safetensors.safe_open safetensors.torch.load_file safetensors.torch.load_model"),
    **_calls("file", "safetensors.numpy.load_file safetensors.safe_open PIL.Image.open cv2.imread cv2.VideoCapture"),
    **_calls("file", "av.open imageio.imread imageio.get_reader imageio.v3.imread decord.VideoReader mmap.mmap"),
    **_calls(
        "file", "torchvision.io.read_video torchvision.io.read_image pickle.load accelerate.load_checkpoint_in_model"
    ),
    **_calls("file", "tarfile.open zipfile.ZipFile h5py.File lmdb.open os.open os.read os.pread os.readv"),
    **_calls("save", "torch.save safetensors.torch.save_file safetensors.torch.save_model numpy.save numpy.savez"),
    **_calls("save", "numpy.savez_compressed shutil.rmtree shutil.move shutil.copy shutil.copy2 shutil.copyfile"),
    **_calls("save", "shutil.copytree cv2.imwrite os.fsync os.write pickle.dump safetensors.numpy.save_file"),
    **_calls("socket", "socket.create_connection", 1),
    **_calls(
        "socket", "ssl.get_server_certificate socket.getaddrinfo socket.gethostbyname telnetlib.Telnet ftplib.FTP"
    ),
    **_calls("select", "select.select", 3),
    **_calls("select", "multiprocessing.connection.wait", 1),
    **_calls("input", "builtins.input builtins.breakpoint getpass.getpass pdb.set_trace code.interact click.prompt"),
    **_calls("input", "click.confirm click.pause matplotlib.pyplot.show IPython.embed tkinter.mainloop"),
    **_calls("input", "cv2.waitKey", 0),
    **_calls("tracker", "wandb.login wandb.init wandb.finish wandb.log wandb.save wandb.watch"),
    **_calls("tracker", "swanlab.login swanlab.init swanlab.log neptune.init_run mlflow.start_run comet_ml.Experiment"),
    **_calls("signal", "signal.pause signal.sigwait signal.sigwaitinfo", NEVER),
    **_calls("signal", "signal.sigtimedwait", 1),
    **_calls("async", "asyncio.run anyio.run trio.run uvloop.run"),
    **_calls("server", "uvicorn.run wsgiref.simple_server.make_server werkzeug.serving.run_simple"),
    **_calls("collective", "accelerate.Accelerator accelerate.utils.wait_for_everyone"),
    **_calls("collective", "accelerate.utils.gather accelerate.utils.gather_object accelerate.utils.reduce"),
    **_calls("collective", "accelerate.utils.broadcast accelerate.utils.broadcast_object_list"),
    **_calls("collective", "torch.nn.parallel.DistributedDataParallel deepspeed.initialize deepspeed.init_distributed"),
    **_calls("hub", "transformers.pipeline torch.hub.load diffusers.DiffusionPipeline.download open_clip.create_model"),
    **_calls("future", "ray.get ray.wait joblib.Parallel tqdm.contrib.concurrent.thread_map"),
    **_calls("future", "tqdm.contrib.concurrent.process_map"),
    **_calls("socket", "smtplib.SMTP smtplib.SMTP_SSL imaplib.IMAP4 poplib.POP3 psycopg2.connect pymysql.connect"),
    **_calls("hub", "datasets.load_dataset open_clip.create_model_and_transforms"),
}
"""Functions of libraries that wait. os.read waits on a pipe as on a file."""

PREFIXES: dict[str, tuple[Call, frozenset[str]]] = {
    "torch.distributed.": (
        Call("collective"),
        _words(
            "batch_isend_irecv is_initialized is_available get_rank get_world_size get_backend is_nccl_available is_gloo_available new_group "
            "isend irecv ReduceOp is_mpi_available is_torchelastic_launched get_process_group_ranks group"
        ),
    ),
    "huggingface_hub.": (
        Call("hub"),
        _words(
            "try_to_load_from_cache constants utils get_token scan_cache_dir logging hf_hub_url file_download "
            "cached_assets_path split_torch_state_dict_into_shards load_torch_model ModelCard"
        ),
    ),
    "sys.stdin.": (Call("input"), _words("fileno isatty close closed encoding reconfigure buffer")),
}
"""Packages all of whose functions wait, except those named. Classes (a capital first letter) do not."""

CONSTRUCTORS: dict[str, str] = {
    **_types(
        "Executor",
        "concurrent.futures.ThreadPoolExecutor concurrent.futures.ProcessPoolExecutor concurrent.futures.Executor "
        "concurrent.futures.thread.ThreadPoolExecutor concurrent.futures.process.ProcessPoolExecutor",
    ),
    **_types("Future", "concurrent.futures.Future torch.futures.Future"),
    **_types(
        "Queue",
        "queue.Queue queue.LifoQueue queue.PriorityQueue multiprocessing.Queue multiprocessing.JoinableQueue "
        "asyncio.Queue queue.SimpleQueue multiprocessing.SimpleQueue",
    ),
    **_types("Thread", "threading.Thread threading.Timer"),
    **_types("Process", "multiprocessing.Process multiprocessing.context.SpawnProcess"),
    **_types("Event", "threading.Event multiprocessing.Event asyncio.Event"),
    **_types("Condition", "threading.Condition multiprocessing.Condition asyncio.Condition"),
    **_types("Barrier", "threading.Barrier multiprocessing.Barrier asyncio.Barrier"),
    **_types(
        "Lock",
        "threading.Lock threading.RLock threading.Semaphore threading.BoundedSemaphore multiprocessing.Lock "
        "multiprocessing.RLock multiprocessing.Semaphore multiprocessing.BoundedSemaphore asyncio.Lock asyncio.Semaphore "
        "_thread.allocate_lock filelock.FileLock filelock.SoftFileLock filelock.UnixFileLock portalocker.Lock "
        "fasteners.InterProcessLock",
    ),
    "subprocess.Popen": "Popen",
    **_types("Store", "torch.distributed.TCPStore torch.distributed.FileStore torch.distributed.PrefixStore"),
    **_types("Remote", "paramiko.SSHClient pexpect.spawn"),
    "sched.scheduler": "Scheduler",
    "dask.distributed.Client": "Cluster",
    **_types("Pool", "multiprocessing.Pool multiprocessing.pool.Pool multiprocessing.pool.ThreadPool"),
    **_types(
        "Stream",
        "torch.cuda.Stream torch.Stream torch.cuda.current_stream torch.cuda.default_stream torch.xpu.Stream",
    ),
    **_types("CudaEvent", "torch.cuda.Event torch.Event torch.xpu.Event torch.mps.Event"),
    **_types("Accelerator", "accelerate.Accelerator accelerate.accelerator.Accelerator accelerate.PartialState"),
    **_types("DataLoader", "torch.utils.data.DataLoader torch.utils.data.dataloader.DataLoader"),
    **_types("Socket", "socket.socket socket.create_connection"),
    **_types(
        "Connection",
        "multiprocessing.Pipe multiprocessing.connection.Client multiprocessing.connection.Listener",
    ),
    **_types(
        "Selector",
        "selectors.DefaultSelector selectors.SelectSelector selectors.PollSelector selectors.EpollSelector select.poll "
        "select.epoll select.kqueue",
    ),
    **_types("Session", "requests.Session requests.session aiohttp.ClientSession urllib3.PoolManager"),
    **_types("HttpxClient", "httpx.Client httpx.AsyncClient"),
    **_types("HttpConnection", "http.client.HTTPConnection http.client.HTTPSConnection"),
    **_types("HfApi", "huggingface_hub.HfApi huggingface_hub.hf_api.HfApi huggingface_hub.HfFileSystem"),
    **_types("Loop", "asyncio.get_event_loop asyncio.new_event_loop asyncio.get_running_loop"),
    **_types("Context", "multiprocessing.get_context torch.multiprocessing.get_context"),
    **_types("[]", "builtins.dict collections.OrderedDict collections.defaultdict collections.Counter"),
    **_types("[]", "builtins.list builtins.set builtins.tuple collections.deque"),
    **_types("plain", "builtins.str builtins.int builtins.float builtins.bool pathlib.Path"),
    **_types("plain", "argparse.ArgumentParser logging.getLogger contextvars.ContextVar"),
}
"""What creates an object → its type. `[]` is a container, `[]Future` one of futures, `plain` a type without waits."""

METHODS: dict[str, dict[str, Call]] = {
    "Executor": {"shutdown": Call("future"), "map": Call("future"), "__exit__": Call("future")},
    "Future": {**_calls("future", "result exception", 0), **_calls("future", "wait value")},
    "Queue": {"get": Call("queue", 1), "put": Call("queue", 2), "join": Call("queue"), "join_thread": Call("queue")},
    "Thread": {"join": Call("thread", 0)},
    "Process": {"join": Call("thread", 0)},
    "Event": {"wait": Call("event", 0)},
    "Condition": {
        "wait": Call("event", 0),
        "wait_for": Call("event", 1),
        **_calls("lock", "acquire", 1),
        "__enter__": Call("lock"),
    },
    "Barrier": {"wait": Call("event", 0)},
    "Lock": {"acquire": Call("lock", 1), "__enter__": Call("lock")},
    "Popen": {"wait": Call("subprocess", 0), "communicate": Call("subprocess", 1), "__exit__": Call("subprocess")},
    "PopenPipe": _calls("subprocess", "read readline readlines write flush __iter__ read1"),
    "Pool": {**_calls("future", "map starmap imap imap_unordered apply"), "join": Call("thread")},
    "AsyncResult": _calls("future", "get wait", 0),
    "Stream": _calls("stream", "synchronize wait_stream wait_event"),
    "CudaEvent": _calls("stream", "synchronize wait"),
    "DataLoader": {"__iter__": Call("dataloader")},
    "Socket": _calls("socket", "recv recv_into recvfrom recvmsg recvfrom_into accept connect sendall send"),
    "Connection": {
        **_calls("socket", "recv recv_bytes recv_bytes_into send send_bytes accept"),
        "poll": Call("socket", 0, "0"),
    },
    "Selector": {"select": Call("select", 0), "poll": Call("select", 0), "control": Call("select", 2)},
    "Session": _calls("http", "get post put patch delete head request send urlopen ws_connect"),
    "HttpxClient": _calls("http", "get post put patch delete head request send stream", NEVER, "httpx: 5 s"),
    "HttpConnection": _calls("http", "request getresponse connect"),
    "Loop": {"run_until_complete": Call("async"), "run_forever": Call("server"), "run_in_executor": Call("async")},
    "Work": _calls("collective", "wait", 0),
    "Accelerator": {
        **_calls(
            "collective", "wait_for_everyone gather gather_for_metrics reduce pad_across_processes prepare backward"
        ),
        **_calls("collective", "main_process_first local_main_process_first broadcast"),
        **_calls("tracker", "init_trackers end_training log log_images"),
        **_calls("save", "save_state save save_model"),
        **_calls("file", "load_state"),
    },
    "Path": {**_calls("file", "read_text read_bytes"), **_calls("save", "write_text write_bytes")},
    "WebApp": {"launch": Call("server")},
    "Store": {"get": Call("collective"), "wait": Call("collective", 1)},
    "Remote": _calls("socket", "connect exec_command expect expect_exact wait read recv"),
    "Scheduler": {"run": Call("thread")},
    "Cluster": _calls("future", "gather"),
    "Stdin": _calls("input", "read readline readlines __iter__"),
    "Tracker": _calls("tracker", "log finish init log_images log_artifact save"),
}
"""Type → its methods that wait. `__enter__`, `__exit__` and `__iter__` stand for `with` and `for`."""

RESULTS: dict[tuple[str, str], str] = {
    ("Executor", "submit"): "Future",
    ("Executor", "__enter__"): "Executor",
    ("Pool", "apply_async"): "AsyncResult",
    ("Pool", "map_async"): "AsyncResult",
    ("Pool", "starmap_async"): "AsyncResult",
    ("Pool", "__enter__"): "Pool",
    ("Popen", "__enter__"): "Popen",
    ("Stream", "record_event"): "CudaEvent",
    ("Loop", "run_in_executor"): "Future",
    ("Context", "Pool"): "Pool",
    ("Context", "Queue"): "Queue",
    ("Context", "JoinableQueue"): "Queue",
    ("Context", "SimpleQueue"): "Queue",
    ("Context", "Process"): "Process",
    ("Context", "Event"): "Event",
    ("Context", "Lock"): "Lock",
    ("Context", "Barrier"): "Barrier",
    ("Context", "Condition"): "Condition",
    ("Context", "Semaphore"): "Lock",
    ("Context", "Pipe"): "Connection",
    ("Accelerator", "get_tracker"): "Tracker",
}
"""(type, method) → the type of what the method returns."""
ANY_RESULTS = {"get_lock": "Lock", "accept": "Socket", "record_event": "CudaEvent", "current_stream": "Stream"}
"""A method that returns this type on whatever object."""
ATTRIBUTES = {("Popen", "stdout"): "PopenPipe", ("Popen", "stderr"): "PopenPipe", ("Popen", "stdin"): "PopenPipe"}
"""(type, attribute) → the type of the attribute."""

HINTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"(^|_)(future|fut)s$", "[]Future"),
        (r"(^|_)(future|fut)$", "Future"),
        (r"(^|_)accelerator$", "Accelerator"),
        (r"(^|_)(executor|thread_pool|tpe)$", "Executor"),
        (r"(^|_)queue$|^q$", "Queue"),
        (r"(^|_)(r?lock|mutex|semaphore|sem)$", "Lock"),
        (r"(^|_)data_?loader$", "DataLoader"),
        (r"(^|_)threads$", "[]Thread"),
        (r"(^|_)thread$", "Thread"),
        (r"(^|_)(proc|popen)$", "Popen"),
        (r"(^|_)(sock|socket)$", "Socket"),
        (r"(^|_)conn$", "Connection"),
        (r"(^|_)selector$", "Selector"),
        (r"(^|_)(hf_)?api$", "HfApi"),
        (r"^(demo|web_?app|interface)$", "WebApp"),
        (r"(^|_)tracker$|^wandb_run$", "Tracker"),
    )
)
"""The name of a variable whose type is unknown → the type that it suggests. The first match decides."""

UNKNOWN: dict[str, Call] = {
    **_calls("future", "result", 0),
    **_calls("event", "wait", 0),
    **_calls("subprocess", "communicate", 1),
    **_calls("collective", "wait_for_everyone gather_for_metrics main_process_first local_main_process_first barrier"),
    **_calls("collective", "monitored_barrier all_reduce all_gather reduce_scatter all_to_all"),
    **_calls("tracker", "end_training init_trackers"),
    **_calls("save", "save_state"),
    **_calls("file", "load_state"),
    **_calls("hub", "from_pretrained from_single_file push_to_hub load_lora_weights load_textual_inversion"),
    **_calls("hub", "upload_file upload_folder upload_large_folder create_repo snapshot_download hf_hub_download"),
    **_calls("stream", "synchronize wait_stream wait_event"),
    **_calls("lock", "acquire", 1),
    **_calls(
        "socket", "recv recv_bytes recv_into recvfrom recvmsg recv_multipart recv_json recv_pyobj recv_string accept"
    ),
    **_calls("server", "serve_forever run_forever mainloop"),
    **_calls("async", "run_until_complete"),
    **_calls("thread", "join_thread waitpid"),
}
"""Methods that wait on whatever object, unless its type is known or the checkout defines the method itself."""
NO_ARGUMENT: dict[str, Call] = {
    **_calls("thread", "join", 0),
    **_calls("queue", "get", 1),
    **_calls("future", "shutdown"),
    **_calls("select", "select", 0),
}
"""Methods that wait on whatever object when they have no positional argument: `t.join()`, but not `", ".join(names)`."""
BY_NAME = {"MemoryEfficientSafeOpen": Call("file")}
"""Classes of the trainers whose creation reads a file, by name."""
VERBS = _words(
    "wait waits waitpid recv receive barrier acquire flock lockf sigwait synchronize rendezvous serve subscribe blpop "
    "brpop waitkey wait4 waitall sync_stream block_until_ready"
)
"""A call of a library that is in no table waits when one of these words is part of its name."""
ALONE = re.compile(r"optim|sched|loader")
"""What `accelerator.prepare` prepares without the other ranks; a model needs them."""
LOCAL = ("torch.nn.",)
"""Packages whose `from_pretrained` reads nothing."""
VERBLESS = _words(
    "set_wait wait_time no_wait is_waiting wait_until_ready_callback get_wait_time wait_fixed wait_random "
    "wait_exponential nowait"
)
"""Names with such a word that do not wait."""
POLLS = _words("done is_alive is_set empty poll query exists running qsize is_file is_completed full ready locked")
"""Methods that a loop asks until their answer changes."""
CLOCKS = _words("time.time time.monotonic time.perf_counter datetime.datetime.now time.monotonic_ns time.time_ns")
LIMIT_NAMES = re.compile(r"deadline|timeout|time_limit|expire|retr|attempt|tries|end_s$|until")
"""A name in the condition of a polling loop that shows a limit."""
SLEEPS = _words("time.sleep asyncio.sleep trio.sleep anyio.sleep gevent.sleep")
ASYNC_LIMITS = _words(
    "asyncio.wait_for asyncio.timeout asyncio.timeout_at async_timeout.timeout anyio.fail_after anyio.move_on_after "
    "trio.fail_after trio.move_on_after"
)
SAMPLERS = re.compile(r"denoise|sample|infer|generate|__call__")
"""Names of functions in which a loop over timesteps is a sampling loop."""
THREAD_STARTERS = _words("submit map apply_async map_async starmap starmap_async imap imap_unordered run_in_executor")
"""Methods of pools that run a function in another thread or process."""
ALIASES = {
    "torch.multiprocessing.": "multiprocessing.",
    "multiprocessing.dummy.": "multiprocessing.",
    "multiprocess.": "multiprocessing.",
    "torch.distributed.distributed_c10d.": "torch.distributed.",
    "accelerate.accelerator.": "accelerate.",
    "accelerate.state.": "accelerate.",
    "huggingface_hub.hf_api.": "huggingface_hub.",
    "huggingface_hub.file_download.": "huggingface_hub.",
    "numpy.lib.npyio.": "numpy.",
    "torch.serialization.": "torch.",
}
"""The start of a qualified name → the name under which the tables know it."""

# ---------------------------------------------------------------------------------------------------------------------
# What a run can reach

SCRIPTS = (
    # sd-scripts
    "train_network.py",
    "flux_train_network.py",
    "sdxl_train_network.py",
    "sd3_train_network.py",
    "lumina_train_network.py",
    "hunyuan_image_train_network.py",
    "anima_train_network.py",
    # musubi-tuner
    *(
        f"{family}_{script}.py"
        for family in ("zimage", "flux_2", "flux_kontext", "qwen_image", "krea2", "wan")
        for script in ("train_network", "cache_latents", "cache_text_encoder_outputs")
    ),
)
"""The scripts that presets start. Everything else in a checkout is a tool, or trains something else."""
SCRIPT_FOLDERS = ("", "src/musubi_tuner")
CREATES_NETWORK = ("create_network", "create_arch_network")
"""A module with one of these functions is a network module: `--network_module` names it, and the trainer imports it."""
LEFT_OUT = _words("tests test .git .venv venv node_modules site-packages build dist __pycache__")
"""Folders that are no part of a run."""

# ---------------------------------------------------------------------------------------------------------------------
# What bounds a wait

WITHIN, DIRECT, CALLS, GLOBAL, BATCH = "within", "direct", "calls", "global", "batch"


@dataclass(frozen=True)
class Guard:
    """What one patch bounds.

    target: the target of the patch ("module:name") which must be guarded for this row to count.
    how: WITHIN: a deadline surrounds the function, with everything that it calls. DIRECT: the calls in the function itself.
        CALLS: the calls anywhere, because the class or function that waits is guarded. GLOBAL: the calls in the module, where
        a global (`np`) is replaced. BATCH: what a data loader calls to make a batch.
    kinds: the kinds of waits that it bounds; empty: all. calls: a regular expression for the call.
    limit: the row of guards/limits.py, or what else bounds it. function: for DIRECT, the function when it is not the target.
    """

    patch: str
    target: str
    how: str
    limit: str
    kinds: tuple[str, ...] = ()
    calls: str = ""
    function: str = ""


_UTIL = "library.train_util"
_HUBS = ("library.huggingface_util", "musubi_tuner.utils.huggingface_utils")
_STRATEGIES = ("base", "flux", "sdxl", "sd3", "lumina", "anima", "hunyuan_image")
_LOADER = "torch.utils.data.dataloader:"
_MUSUBI = "musubi_tuner"
_SWAP = f"{_MUSUBI}.modules.custom_offloading_utils"
_SOURCES = f"{_MUSUBI}.dataset.datasources"
_BASE = f"{_MUSUBI}.training.trainer_base"
_ACCELERATOR = "accelerate.accelerator:Accelerator"
_SAMPLES = {
    "library.flux_train_utils": "sample_image_inference",
    "library.sd3_train_utils": "sample_image_inference",
    "library.lumina_train_util": "sample_image_inference",
    "library.anima_train_utils": "_sample_image_inference",
    "hunyuan_image_train_network": "sample_image_inference",
    _UTIL: "sample_image_inference",
}

GUARDS: tuple[Guard, ...] = (
    Guard("block_swap", "library.custom_offloading_utils:Offloader._wait_blocks_move", WITHIN, "block_swap_timeout_s"),
    Guard("dataloader", f"{_LOADER}_MultiProcessingDataLoaderIter._next_data", CALLS, "dataloader_timeout_s", ("dataloader",)),
    Guard("dataloader", f"{_LOADER}_MultiProcessingDataLoaderIter._next_data", BATCH, "dataloader_timeout_s"),
    *(
        Guard("npz", f"library.strategy_{name}:np", GLOBAL, "npz_timeout_s", ("file",), r"^(np|numpy)\.load$")
        for name in _STRATEGIES
    ),
    Guard("npz", f"{_UTIL}:np", GLOBAL, "npz_timeout_s", ("file",), r"^(np|numpy)\.load$"),
    Guard("images", f"{_UTIL}:load_image", WITHIN, "image_timeout_s"),
    Guard("images", f"{_UTIL}:BaseDataset.get_image_size", WITHIN, "image_timeout_s"),
    # The tasks of the pool that reads images for caching are calls of load_image.
    Guard(
        "images",
        f"{_UTIL}:load_image",
        DIRECT,
        "image_timeout_s",
        ("future",),
        function="BaseDataset.new_cache_latents",
    ),
    Guard("trackers", f"{_UTIL}:init_trackers", WITHIN, "tracker_timeout_s"),
    Guard("trackers", f"{_UTIL}:init_trackers", CALLS, "a queue of calls", ("tracker",), r"(^|[._])(log|log_images)$"),
    Guard("trackers", f"{_UTIL}:prepare_accelerator", DIRECT, "no login before the tracker starts", ("tracker",)),
    *(Guard("sampling", f"{module}:{name}", WITHIN, "sample_budget_s") for module, name in _SAMPLES.items()),
    Guard(
        "hub", "huggingface_hub.file_download:hf_hub_download", CALLS, "hub_timeout_s", ("hub",),
        r"(^|\.)(hf_hub_download|snapshot_download|from_pretrained|from_single_file)$",
    ),
    Guard("hub", "library.strategy_base:TokenizeStrategy._load_tokenizer", WITHIN, "hub_timeout_s"),
    *(Guard("hub", f"{module}:upload", WITHIN, "upload_timeout_s") for module in _HUBS),
    *(Guard("hub", f"{module}:{name}", WITHIN, "hub_timeout_s") for module in _HUBS for name in ("list_dir", "exists_repo")),
    *(Guard("hub", f"{module}:fire_in_thread", DIRECT, "upload_exit_s", ("exit",)) for module in _HUBS),
    Guard("barrier", "accelerate.accelerator:Accelerator.wait_for_everyone", CALLS, "barrier_timeout_s", ("collective",), r"wait_for_everyone$"),
    Guard("hygiene", f"{_UTIL}:get_git_revision_hash", WITHIN, "git_timeout_s"),
    Guard("save", "train_network:NetworkTrainer.train", DIRECT, "end_training_s", ("tracker",), r"end_training$"),
    Guard("exit", "", CALLS, "exit_grace_s", ("exit",)),
    # musubi-tuner
    *(
        Guard("block_swap", f"{_SWAP}:{name}", WITHIN, "block_swap_timeout_s")
        for name in (
            *("Offloader._wait_blocks_move", "_StagedCopier.wait", "_StagedCopier._flush", "_StagedCopier.sync"),
            *("_StagedCopier.reset", "_DirectCopier.sync", "_synchronize_device"),
        )
    ),
    Guard("caches", f"{_MUSUBI}.dataset.bucket:load_file", GLOBAL, "npz_timeout_s", ("file",), "^load_file$"),
    *(
        Guard("caches", f"{_SOURCES}:{source}.{name}", WITHIN, "image_timeout_s")
        for source in ("ImageDirectoryDatasource", "ImageJsonlDatasource")
        for name in ("get_image_data", "get_caption")
    ),
    # The tasks for which a caching command polls read images and captions, which the rows above limit.
    *(
        Guard(
            "caches",
            f"{_SOURCES}:ImageDirectoryDatasource.{read}",
            DIRECT,
            "image_timeout_s",
            ("future", "polling"),
            function=function,
        )
        for function, read in (
            ("ImageDataset.retrieve_latent_cache_batches", "get_image_data"),
            ("BaseDataset._default_retrieve_text_encoder_output_cache_batches", "get_caption"),
        )
    ),
    # A state is downloaded by tasks that are calls of hf_hub_download.
    Guard(
        "hub",
        "huggingface_hub.file_download:hf_hub_download",
        DIRECT,
        "hub_timeout_s",
        ("async",),
        function="NetworkTrainer.resume_from_local_or_hf_if_specified",
    ),
    Guard("trackers", f"{_ACCELERATOR}.init_trackers", CALLS, "tracker_timeout_s", ("tracker",), "init_trackers$"),
    Guard(
        "trackers",
        f"{_ACCELERATOR}.init_trackers",
        CALLS,
        "a queue of calls",
        ("tracker",),
        r"(^|[._])(log|log_images)$",
    ),
    Guard(
        "trackers",
        f"{_MUSUBI}.training.accelerator_setup:prepare_accelerator",
        DIRECT,
        "no login before the tracker starts",
        ("tracker",),
    ),
    Guard("sampling", f"{_BASE}:NetworkTrainer.sample_image_inference", WITHIN, "sample_budget_s"),
    Guard(
        "save",
        f"{_BASE}:NetworkTrainer.train",
        DIRECT,
        "end_training_s",
        ("tracker",),
        r"end_training$",
        function="NetworkTrainer._run_training_loop",
    ),
)  # fmt: skip
"""What bounds a wait by name. The first row that matches decides."""
