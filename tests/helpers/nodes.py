"""Nodes on this machine: each has a network, a host name, an /etc/hosts and processes of its own, in namespaces.

A node ends with the process that made it, however that ends: the first process of a node reads from a pipe of its
maker, and the kernel ends the others, and removes the network, when the first ends. Nothing has a name that remains.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

INTERFACE = "net0"
NAMESPACES = ("net", "uts", "pid", "mnt")
_FLAGS = ("--net", "--uts", "--pid", "--mount")
_START = """
hostname "$0" && mount --bind "$1" /etc/hosts && mount --bind /dev/null /etc/resolv.conf && ip link set lo up &&
echo up && exec cat
"""  # no name server: torch's store asks for the names of addresses, and would wait for one that cannot be reached


class Node(NamedTuple):
    """A host: ``name`` means ``address`` on every node."""

    name: str
    address: str
    pid: int  # of its first process, as seen from here

    def command(self, *words):
        """Return the command that runs ``words`` there."""
        here = f"--chdir={Path.cwd()}"  # nsenter goes to /
        return ["nsenter", f"--target={self.pid}", *_FLAGS, "env", here, *map(str, words)]

    def run(self, *words):
        """Run a command there, and return what it prints."""
        return subprocess.run(
            self.command(*words), check=True, capture_output=True, text=True
        ).stdout

    def lose(self):
        """Lose the node as in a power failure: no connection is closed, and nothing answers any more."""
        self.run("ip", "address", "flush", "dev", INTERFACE)
        os.kill(self.pid, 9)


def missing():
    """Return why there can be no nodes here, or an empty string."""
    programs = [
        name
        for name in ("ip", "unshare", "nsenter", "mount", "hostname")
        if shutil.which(name) is None
    ]
    if programs:
        return f"no {', '.join(programs)} here (apt-get install iproute2)"
    if os.geteuid():
        return "network namespaces need root"
    test = subprocess.run(
        ["unshare", *_FLAGS, "--fork", "ip", "link"], capture_output=True, text=True
    )
    return f"no network namespaces here: {test.stderr.strip()}" if test.returncode else ""


@contextmanager
def two_nodes(folder):
    """Make two nodes that are connected, and end them; ``folder`` is for their files."""
    addresses = {"node0": "10.77.0.1", "node1": "10.77.0.2"}
    hosts = folder / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost\n" + "".join(f"{each} {name}\n" for name, each in addresses.items())
    )
    with ExitStack() as stack:
        first, second = nodes = [
            Node(*each, stack.enter_context(_first(each[0], hosts))) for each in addresses.items()
        ]
        # The other end goes with the network of either, so a network is kept when its processes end.
        for node in nodes:
            stack.callback(os.close, os.open(f"/proc/{node.pid}/ns/net", os.O_RDONLY))
        link = [
            "ip",
            "link",
            "add",
            INTERFACE,
            "type",
            "veth",
            "peer",
            INTERFACE,
            "netns",
            str(second.pid),
        ]
        subprocess.run(
            ["nsenter", f"--target={first.pid}", "--net", *link], check=True
        )  # pids are those of here
        for node in nodes:
            node.run("ip", "address", "add", f"{node.address}/24", "dev", INTERFACE)
            node.run("ip", "link", "set", INTERFACE, "up")
        yield first, second


@contextmanager
def _first(name, hosts):
    command = ["unshare", *_FLAGS, "--fork", "--mount-proc", "sh", "-c", _START, name, str(hosts)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
