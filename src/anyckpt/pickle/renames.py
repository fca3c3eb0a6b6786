"""The Python 2 to 3 renames that a loader applies to names in pickles of protocols 0 to 2.

Facts from CPython 3.11 `Lib/_compat_pickle.py` (IMPORT_MAPPING, NAME_MAPPING and their additions for Python 3 names
that Python 2 spelt otherwise); torch's weights_only reader applies the same maps at every protocol.
"""

from __future__ import annotations

MODULES: dict[str, str] = {
    "__builtin__": "builtins", "copy_reg": "copyreg", "Queue": "queue", "SocketServer": "socketserver",
    "ConfigParser": "configparser", "repr": "reprlib", "tkFileDialog": "tkinter.filedialog",
    "tkSimpleDialog": "tkinter.simpledialog", "tkColorChooser": "tkinter.colorchooser",
    "tkCommonDialog": "tkinter.commondialog", "Dialog": "tkinter.dialog", "Tkdnd": "tkinter.dnd",
    "tkFont": "tkinter.font", "tkMessageBox": "tkinter.messagebox", "ScrolledText": "tkinter.scrolledtext",
    "Tkconstants": "tkinter.constants", "Tix": "tkinter.tix", "ttk": "tkinter.ttk", "Tkinter": "tkinter",
    "markupbase": "_markupbase", "_winreg": "winreg", "thread": "_thread", "dummy_thread": "_dummy_thread",
    "dbhash": "dbm.bsd", "dumbdbm": "dbm.dumb", "dbm": "dbm.ndbm", "gdbm": "dbm.gnu", "xmlrpclib": "xmlrpc.client",
    "SimpleXMLRPCServer": "xmlrpc.server", "httplib": "http.client", "htmlentitydefs": "html.entities",
    "HTMLParser": "html.parser", "Cookie": "http.cookies", "cookielib": "http.cookiejar",
    "BaseHTTPServer": "http.server", "test.test_support": "test.support", "commands": "subprocess",
    "urlparse": "urllib.parse", "robotparser": "urllib.robotparser", "urllib2": "urllib.request", "anydbm": "dbm",
    "_abcoll": "collections.abc", "cPickle": "pickle", "_elementtree": "xml.etree.ElementTree",
    "FileDialog": "tkinter.filedialog", "SimpleDialog": "tkinter.simpledialog", "DocXMLRPCServer": "xmlrpc.server",
    "SimpleHTTPServer": "http.server", "CGIHTTPServer": "http.server", "UserDict": "collections",
    "UserList": "collections", "UserString": "collections", "whichdb": "dbm", "StringIO": "io", "cStringIO": "io",
}

_EXCEPTIONS = """
ArithmeticError AssertionError AttributeError BaseException BufferError BytesWarning DeprecationWarning EOFError
EnvironmentError Exception FloatingPointError FutureWarning GeneratorExit IOError ImportError ImportWarning
IndentationError IndexError KeyError KeyboardInterrupt LookupError MemoryError NameError NotImplementedError OSError
OverflowError PendingDeprecationWarning ReferenceError RuntimeError RuntimeWarning StopIteration SyntaxError
SyntaxWarning SystemError SystemExit TabError TypeError UnboundLocalError UnicodeDecodeError UnicodeEncodeError
UnicodeError UnicodeTranslateError UnicodeWarning UserWarning ValueError Warning ZeroDivisionError
""".split()

NAMES: dict[tuple[str, str], tuple[str, str]] = {
    **{("exceptions", name): ("builtins", name) for name in _EXCEPTIONS},
    ("__builtin__", "xrange"): ("builtins", "range"),
    ("__builtin__", "reduce"): ("functools", "reduce"),
    ("__builtin__", "intern"): ("sys", "intern"),
    ("__builtin__", "unichr"): ("builtins", "chr"),
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "long"): ("builtins", "int"),
    ("itertools", "izip"): ("builtins", "zip"),
    ("itertools", "imap"): ("builtins", "map"),
    ("itertools", "ifilter"): ("builtins", "filter"),
    ("itertools", "ifilterfalse"): ("itertools", "filterfalse"),
    ("itertools", "izip_longest"): ("itertools", "zip_longest"),
    ("UserDict", "IterableUserDict"): ("collections", "UserDict"),
    ("UserList", "UserList"): ("collections", "UserList"),
    ("UserString", "UserString"): ("collections", "UserString"),
    ("whichdb", "whichdb"): ("dbm", "whichdb"),
    ("_socket", "fromfd"): ("socket", "fromfd"),
    ("_multiprocessing", "Connection"): ("multiprocessing.connection", "Connection"),
    ("multiprocessing.process", "Process"): ("multiprocessing.context", "Process"),
    ("multiprocessing.forking", "Popen"): ("multiprocessing.popen_fork", "Popen"),
    ("urllib", "ContentTooShortError"): ("urllib.error", "ContentTooShortError"),
    ("urllib", "getproxies"): ("urllib.request", "getproxies"),
    ("urllib", "pathname2url"): ("urllib.request", "pathname2url"),
    ("urllib", "quote_plus"): ("urllib.parse", "quote_plus"),
    ("urllib", "quote"): ("urllib.parse", "quote"),
    ("urllib", "unquote_plus"): ("urllib.parse", "unquote_plus"),
    ("urllib", "unquote"): ("urllib.parse", "unquote"),
    ("urllib", "url2pathname"): ("urllib.request", "url2pathname"),
    ("urllib", "urlcleanup"): ("urllib.request", "urlcleanup"),
    ("urllib", "urlencode"): ("urllib.parse", "urlencode"),
    ("urllib", "urlopen"): ("urllib.request", "urlopen"),
    ("urllib", "urlretrieve"): ("urllib.request", "urlretrieve"),
    ("urllib2", "HTTPError"): ("urllib.error", "HTTPError"),
    ("urllib2", "URLError"): ("urllib.error", "URLError"),
    ("multiprocessing", "AuthenticationError"): ("multiprocessing.context", "AuthenticationError"),
    ("multiprocessing", "BufferTooShort"): ("multiprocessing.context", "BufferTooShort"),
    ("multiprocessing", "ProcessError"): ("multiprocessing.context", "ProcessError"),
    ("multiprocessing", "TimeoutError"): ("multiprocessing.context", "TimeoutError"),
    ("__builtin__", "basestring"): ("builtins", "str"),
    ("exceptions", "StandardError"): ("builtins", "Exception"),
    ("UserDict", "UserDict"): ("collections", "UserDict"),
    ("socket", "_socketobject"): ("socket", "SocketType"),
}


def to_python3(module: str, name: str) -> tuple[str, str]:
    """The name a Python 3 loader looks up for one written by Python 2."""
    renamed = NAMES.get((module, name))
    return renamed or (MODULES.get(module, module), name)
