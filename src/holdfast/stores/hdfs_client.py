"""A URL → a client of hdfs-native, calls with a limit, and errors as ours. Knows no checkpoints.

The package waits for a NameNode that hangs without an end. So every call runs in a thread of its
own kind, which is left behind when the limit has passed.
"""

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from ..errors import HoldfastError, NoSpaceError, OptionError, StoreError, shown
from ..version import needs

SCHEME = "hdfs"
PORT = 8020  # of a NameNode, where the settings of Hadoop do not know the name
CALL_S = 120.0  # of one call; the client gives up a DataNode after 60 s, and takes another
SETTINGS = {"dfs.client.failover.max.attempts": "5"}  # half a minute; by default several minutes
# What an observer says may be old; who asks it without this provider is sent to the active one.
PROVIDER = "dfs.client.failover.proxy.provider"
ACTIVE_ALONE = "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
WORDS_MAX = 500

T = TypeVar("T")

_URL = re.compile(r"hdfs://([A-Za-z0-9][A-Za-z0-9._-]*)(?::(\d{1,5}))?((?:/[^?#]*)?)\Z")
_REPLY = re.compile(r'(?:Fatal)?RPCError\("([\w.$]+)", "(.*)"\)\Z', re.DOTALL)
_PATH = re.compile(r"/[^\n]*\Z")  # all that the client says of what is not there
_NUMBER = re.compile(r"\(os error (\d+)\)")
_NOT_THERE = "No NameNode hosts found"  # the client has no setting for a name without a port
_FULL = re.compile(
    r"could only be \w+ to 0 .*There are [1-9]\d* datanode\(s\) running and no node\(s\) are excl"
)
_CLASSES = {  # of the NameNode's exceptions
    "AccessControlException": errno.EACCES,
    "FileNotFoundException": errno.ENOENT,
    "LeaseExpiredException": errno.ENOENT,
    "ParentNotDirectoryException": errno.ENOTDIR,
    "PathIsNotEmptyDirectoryException": errno.ENOTEMPTY,
    "InvalidPathException": errno.EINVAL,
    "SafeModeException": errno.EAGAIN,
    "NSQuotaExceededException": errno.EDQUOT,
    "DSQuotaExceededException": errno.EDQUOT,
}
_WORDS = {  # what it says where its exception says little
    "Path is not a file": errno.EISDIR,
    "already exists as a directory": errno.EEXIST,
    "is not a directory": errno.ENOTDIR,  # of Hadoop 2
    "must both be directories": errno.EISDIR,
}
_TYPES: dict[type[BaseException], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotImplementedError: errno.EOPNOTSUPP,
    TimeoutError: errno.ETIMEDOUT,
}

_clients: dict[str, Any] = {}
_is_forked = False  # from a process whose client had threads


def split_url(url: str, named: str = "path") -> tuple[str, str]:
    """Return the NameNode and the path: ``hdfs://nn:8020/a/b/`` → ``("hdfs://nn:8020", "/a/b")``.

    The root's path is empty.

    Raises:
        OptionError: it is no URL of HDFS.
    """
    match = _URL.match(url)
    host, port, path = match.groups() if match else ("", "", "")
    path = path.removesuffix("/")
    parts = path.split("/")[1:]
    if not match or not all(part not in ("", ".", "..") and "\0" not in part for part in parts):
        raise OptionError(
            f"{named} is {shown(url)}; expected hdfs://NAMENODE:PORT/NAME, or a name that Hadoop's "
            "settings know in place of NAMENODE:PORT, without empty parts, '.', '..', '?' and '#'"
        )
    return f"hdfs://{host}" + (f":{port}" if port else ""), path


def client(base: str) -> Any:
    """Return the client of a NameNode; settings come from the files in HADOOP_CONF_DIR.

    Raises:
        OptionError: hdfs-native is not installed, or refuses the settings.
    """
    if (kept := _clients.get(base)) is not None:
        return kept
    try:
        from hdfs_native import Client
    except ImportError as error:
        raise OptionError(needs("hdfs-native", SCHEME, base)) from error
    host = base.removeprefix(f"{SCHEME}://")
    settings = SETTINGS | {f"{PROVIDER}.{host}": ACTIVE_ALONE}
    try:
        try:
            made = Client(base, settings)
        except Exception as error:
            if _NOT_THERE not in str(error):
                raise
            made = Client(f"{base}:{PORT}", settings)
    except Exception as error:
        raise OptionError(f"{base}: {_said(error)}") from error
    return _clients.setdefault(base, made)


def _in_child() -> None:
    global _is_forked
    _is_forked = bool(_clients)


os.register_at_fork(after_in_child=_in_child)


class _Call:
    """One call in a thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class _Threads:
    """Threads that run calls: as many as run at a time, and those whose calls never end."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, function: Callable[[], T]) -> T:
        call = _Call(function)
        with self._lock:
            is_new, self._idle = not self._idle, max(0, self._idle - 1)
        if is_new:
            # Nobody waits for it when the process ends.
            threading.Thread(target=self._work, name="holdfast-hdfs", daemon=True).start()
        self._calls.put(call)
        if not call.done.wait(CALL_S):
            raise TimeoutError(f"no answer in {CALL_S:.0f} s; it may take effect later")
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call.result = call.function()
            except BaseException as error:  # the package's panics are no Exception
                call.error = error
            with self._lock:
                self._idle += 1
            call.done.set()
            del call


_threads = _Threads()


def asked(what: str, where: str, function: Callable[..., T], *args: Any) -> T:
    """Return what a call of the client returns.

    Args:
        what, where: what is done to what, for errors.

    Raises:
        OptionError: this is a forked child of a process that has used the client.
        StoreError: it failed, or did not end in `CALL_S`.
    """
    if _is_forked:
        raise OptionError(
            "this process was forked from one that uses HDFS, whose client has threads that are "
            "not here. Start it with the method 'spawn' or 'forkserver'"
        )
    try:
        return _threads.run(lambda: function(*args))
    except (HoldfastError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise failure(what, where, error) from error


def failure(what: str, where: str, cause: BaseException) -> StoreError:
    """Return our error for one of the client."""
    said, name = _said(cause), ""
    if reply := _REPLY.match(str(cause)):
        name = reply[1].rpartition(".")[2]
    number = _CLASSES.get(name) or _TYPES.get(type(cause)) or errno.EREMOTEIO
    if found := _NUMBER.search(said):
        number = int(found[1])
    for words, meant in _WORDS.items():
        number = meant if words in said else number
    if _FULL.search(said):
        number = errno.ENOSPC
    is_full = number in (errno.ENOSPC, errno.EDQUOT)
    error = (NoSpaceError if is_full else StoreError)(f"{what} {where}: {said}")
    error.errno = number
    return error


def _said(error: BaseException) -> str:
    """What an error says: the server's own words, without its stack."""
    text = str(error)
    if isinstance(error, FileNotFoundError) and _PATH.match(text):
        return "nothing is there"
    if reply := _REPLY.match(text):
        name = reply[1].rpartition(".")[2]
        text = f"{name}: {reply[2].partition(chr(92) + 'n')[0]}".replace('\\"', '"')
    return text.strip().partition("\n")[0][:WORDS_MAX] or type(error).__name__


def forget_clients() -> None:
    """Let the next call read the settings again."""
    with contextlib.suppress(KeyError):
        while True:
            _clients.popitem()
