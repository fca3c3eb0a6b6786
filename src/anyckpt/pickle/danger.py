"""Names that are known to run code, touch files or reach the network when a pickle calls them: only to give good words.

The gate is the allowlist. A name that is neither there nor here is "unknown", so a gap in this table never makes a
file safe. Sources: the gadgets of picklescan, modelscan and fickling advisories named in the corpus of hostile files,
and the modules of the standard library by what they do.
"""

from __future__ import annotations

_RUNS = "can run programs or code"
_FILES = "can read, write or delete files"
_NETWORK = "can open network connections"
_IMPORTS = "can import any module"
_LOADS = "loads pickles or code of its own"
_REACHES = "reaches other objects by name"
_INSIDE = "is a private part of Python that can run code"

_MODULES_BY_REASON: dict[str, str] = {
    _RUNS: """
        os posix nt posixpath ntpath subprocess commands popen2 pty pexpect ptyprocess sys code codeop bdb pdb trace
        profile cProfile pstats timeit doctest pydoc unittest test lib2to3 ensurepip venv pip setuptools pkg_resources
        distutils idlelib turtledemo tkinter asyncio concurrent multiprocessing threading thread _thread sched signal
        ctypes cffi _cffi_backend gc inspect types typing_extensions builtins atexit readline rlcompleter webbrowser
        antigravity this commands platform uuid logging functools contextlib _osx_support _aix_support winreg
        _winreg msvcrt _winapi win32api resource faulthandler syslog crypt aifc sqlite3 numba cython Cython
        IPython jupyter fabric invoke sh plumbum paramiko django flask jinja2 mako
    """,
    _IMPORTS: "importlib imp pkgutil runpy zipimport zipapp modulefinder site sitecustomize usercustomize",
    _LOADS: """
        pickle _pickle cPickle cloudpickle dill joblib shelve marshal copyreg copy_reg jsonpickle klepto yaml ruamel
        pickletools dbm srsly
    """,
    _FILES: """
        io _io shutil tempfile glob fileinput filecmp zipfile tarfile gzip bz2 lzma mmap linecache codecs netrc mailbox
        pathlib mimetypes plistlib configparser fcntl h5py
    """,
    _NETWORK: """
        socket _socket ssl _ssl http httplib urllib urllib2 urllib3 requests aiohttp httpx ftplib smtplib smtpd
        telnetlib poplib imaplib nntplib socketserver xmlrpc wsgiref select selectors boto3 botocore websocket fsspec
        huggingface_hub
    """,
    _REACHES: "operator _operator",
}

MODULES: dict[str, str] = {
    module: reason for reason, words in _MODULES_BY_REASON.items() for module in words.split()
}
"""Root module -> why. `functools`, `builtins` and other mixed modules stand here: their harmless names are allowed."""

_HARMLESS_BUILTINS = frozenset(
    """
    abs all any ascii bin bool bytearray bytes callable chr complex dict divmod ellipsis enumerate filter float format
    frozenset hash hex id int isinstance issubclass iter len list max min next object oct ord pow range repr reversed
    round set slice sorted str sum tuple zip Ellipsis NotImplemented NoneType
    """.split()
)

_SUBMODULES: dict[str, str] = {
    "torch.serialization": _LOADS, "torch.package": _LOADS, "torch.hub": _IMPORTS, "torch.jit": _RUNS,
    "torch.multiprocessing": _RUNS, "torch.testing": _RUNS, "torch._inductor": _RUNS,
    "torch._dynamo": _RUNS, "torch.fx": _RUNS, "torch.distributed.rpc": _RUNS, "torch.distributed.run": _RUNS,
    "torch.distributed.launch": _RUNS, "torch.distributed.elastic": _RUNS, "torch.distributed.nn.jit": _RUNS,
    "torch.utils.collect_env": _RUNS, "torch.utils.bottleneck": _RUNS, "torch.utils.cpp_extension": _RUNS,
    "torch.utils.hipify": _FILES, "torch.utils._config_module": _LOADS, "torch.utils.model_zoo": _LOADS,
    "torch.utils.viz": _RUNS, "torch.utils.show_pickle": _LOADS, "torch.utils.benchmark": _RUNS,
    "torch.utils._pytree": _IMPORTS, "torch.utils.mobile_optimizer": _LOADS, "torch.utils.file_baton": _FILES,
    "torch.utils.tensorboard": _FILES, "torch.utils.jit": _RUNS, "torch.utils.serialization": _LOADS,
    "torch.ops": _RUNS, "torch._ops": _RUNS, "torch.classes": _RUNS, "torch._C": _RUNS, "torch.storage": _LOADS,
    "torch.export": _RUNS, "torch.onnx": _FILES, "torch.cuda.memory": _FILES, "torch.profiler": _FILES,
    "numpy.f2py": _RUNS, "numpy.testing": _RUNS, "numpy.distutils": _RUNS, "numpy.ctypeslib": _RUNS,
    "numpy.lib": _FILES, "numpy.compat": _FILES, "numpy.core._internal": _REACHES, "numpy._core._internal": _REACHES,
    "pandas.io": _FILES, "pandas.core.computation": _RUNS, "scipy.weave": _RUNS, "tensorflow.io": _FILES,
    "sympy.parsing": _RUNS, "sympy.core.sympify": _RUNS, "keras.utils": _RUNS,
    "transformers.dynamic_module_utils": _RUNS,
}

_NAMES: dict[str, str] = {
    **dict.fromkeys(
        "torch.save numpy.save numpy.savez numpy.savetxt numpy.memmap numpy.fromfile numpy.loadtxt numpy.genfromtxt "
        "numpy.DataSource pandas.read_csv torch.from_file".split(),
        _FILES,
    ),
    **dict.fromkeys("torch.load numpy.load pandas.read_pickle torch.storage._load_from_bytes".split(), _LOADS),
    **dict.fromkeys("pandas.eval torch.compile numpy.vectorize numpy.apply_along_axis".split(), _RUNS),
}

_PRIVATE_STDLIB = frozenset(
    """
    _abc _asyncio _bootlocale _codecs _collections_abc _compat_pickle _ctypes _ctypes_test _curses _dbm _elementtree
    _frozen_importlib _frozen_importlib_external _gdbm _imp _interpreters _interpchannels _json _locale _lsprof _lzma
    _multiprocessing _opcode _posixshmem _posixsubprocess _pydecimal _pyio _pyrepl _queue _signal _sitebuiltins _sqlite3
    _strptime _symtable _sysconfigdata _testcapi _testinternalcapi _threading_local _tkinter _tracemalloc _warnings
    _weakref _weakrefset _xxinterpchannels _xxsubinterpreters _xxtestfuzz _aix_support _bootsubprocess
    """.split()
)


def why_dangerous(module: str, name: str) -> str:
    """A reason that follows the name in a sentence, "" where none is known."""
    if "." in name:
        return "walks from one object into another by a dotted name, which no harmless file does"
    root = module.partition(".")[0]
    if root in ("builtins", "__builtin__") and name in _HARMLESS_BUILTINS:
        return ""
    reason = _NAMES.get(f"{module}.{name}") or MODULES.get(root)
    if reason:
        return reason
    if root in _PRIVATE_STDLIB:
        return _INSIDE
    parts = module.split(".")
    return next(
        (_SUBMODULES[p] for n in range(len(parts), 1, -1) if (p := ".".join(parts[:n])) in _SUBMODULES), ""
    )
