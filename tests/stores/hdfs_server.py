"""A NameNode and a DataNode of Hadoop 2.7 on this machine, up while a block runs.

`make build/stores/.hdfs` takes their jars from pyspark 2.4.8, the last on PyPI that holds them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.stores.hdfs_client import forget_clients
from stores import servers

JARS = servers.BIN.parent / "hadoop"
UP_S = 90.0
BLOCK_BYTES = 4 << 20  # small, so that files have many
# Delay of a request. Without it the client asks for the end of a file before the DataNode has
# reported that, and asks again after half a second.
DELAY_S = 0.004
CLASSES = "org.apache.hadoop.hdfs"
JAVA = [  # Hadoop 2.7 is older than Java's modules
    *["nice", "-n", "5", "java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"],
    *["--add-opens", "java.base/java.lang=ALL-UNNAMED"],
    *["--add-opens", "java.base/java.nio=ALL-UNNAMED"],
    *["--add-opens", "java.base/sun.nio.ch=ALL-UNNAMED"],
    *["--add-opens", "java.security.jgss/sun.security.krb5=ALL-UNNAMED"],
    *["--add-exports", "java.security.jgss/sun.security.krb5=ALL-UNNAMED"],
]
LOGGING = """log4j.rootLogger=WARN,c
log4j.appender.c=org.apache.log4j.ConsoleAppender
log4j.appender.c.layout=org.apache.log4j.PatternLayout
log4j.appender.c.layout.ConversionPattern=%d %p %c{1}: %m%n
"""


@dataclass(frozen=True)
class Cluster:
    """Those that are up.

    Attributes:
        datanode_url: where the DataNode tells of itself.
    """

    root: Path
    url: str
    datanode_url: str
    name_node: "subprocess.Popen[bytes]"

    def admin(self, *arguments: str) -> None:
        """Run ``hdfs dfsadmin``."""
        command = [*_java(self.root), f"{CLASSES}.tools.DFSAdmin", *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the NameNode: it is there, and answers nothing."""
        os.kill(self.name_node.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.name_node.pid, os.WSTOPPED)  # a thread of it may answer until then
        try:
            yield
        finally:
            os.kill(self.name_node.pid, signal.SIGCONT)


clusters: list[Cluster] = []


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Run both; give the URL of their root."""
    forget_clients()
    port, root = servers.free_port(), Path(tempfile.mkdtemp())
    _configure(root, port)
    processes: list[subprocess.Popen[bytes]] = []
    with (root / "log").open("w") as log:
        name_node = f"{CLASSES}.server.namenode.NameNode"
        how = {"stdout": log, "stderr": log, "cwd": root}
        subprocess.run(
            [*_java(root), name_node, "-format", "-force", "-nonInteractive"], check=True, **how
        )
        for main in (name_node, f"{CLASSES}.server.datanode.DataNode"):
            processes.append(subprocess.Popen([*_java(root), main], start_new_session=True, **how))
    wire = [sys.executable, str(Path(__file__).with_name("slow_wire.py"))]
    near = servers.free_port()
    ports = [str(near), str(port), str(DELAY_S)]
    processes.append(subprocess.Popen([*wire, *ports], start_new_session=True))
    url = f"hdfs://127.0.0.1:{near}"
    clusters.append(Cluster(root, url, f"http://127.0.0.1:{port + 4}", processes[0]))
    try:
        _wait_for(url, processes, root / "log")
        yield url
    finally:
        clusters.clear()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(root, ignore_errors=True)
        forget_clients()


def _java(root: Path) -> list[str]:
    return [*JAVA, "-cp", f"{root}/conf:{JARS}/*"]


def _configure(root: Path, port: int) -> None:
    for pages in ("hdfs", "datanode"):  # of the servers' own sites, which are empty here
        (root / "conf" / "webapps" / pages).mkdir(parents=True)
    name_node, data_node = f"127.0.0.1:{port}", "dfs.datanode"
    settings = {
        "core": {"fs.defaultFS": f"hdfs://{name_node}", "hadoop.tmp.dir": str(root / "data")},
        "hdfs": {
            "dfs.replication": "1",
            "dfs.blocksize": str(BLOCK_BYTES),
            "dfs.webhdfs.enabled": "false",
            "dfs.namenode.rpc-address": name_node,
            "dfs.namenode.http-address": f"127.0.0.1:{port + 1}",
            "dfs.namenode.safemode.extension": "0",
            f"{data_node}.address": f"127.0.0.1:{port + 2}",
            f"{data_node}.ipc.address": f"127.0.0.1:{port + 3}",
            f"{data_node}.http.address": f"127.0.0.1:{port + 4}",
            f"{data_node}.hostname": "127.0.0.1",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        },
    }
    for site, properties in settings.items():
        lines = [
            f"<property><name>{name}</name><value>{value}</value></property>"
            for name, value in properties.items()
        ]
        text = "\n".join(["<configuration>", *lines, "</configuration>"])
        (root / "conf" / f"{site}-site.xml").write_text(text)
    (root / "conf" / "log4j.properties").write_text(LOGGING)


def _wait_for(url: str, processes: list["subprocess.Popen[bytes]"], log: Path) -> None:
    from hdfs_native import Client, WriteOptions

    deadline = time.monotonic() + UP_S
    while True:
        alive = not any(process.poll() for process in processes)
        assert alive and time.monotonic() < deadline, log.read_text()[-3000:]
        with contextlib.suppress(Exception):
            client = Client(url, {"dfs.client.failover.max.attempts": "0"})
            with client.create("/up", WriteOptions(overwrite=True)) as file:
                file.write(b"x")
            client.delete("/up")
            return
        time.sleep(0.2)
