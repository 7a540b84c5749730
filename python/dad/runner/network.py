"""Which addresses are ours, and which of them other hosts can reach."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import subprocess
from pathlib import Path

_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B


def addresses_of(host: str) -> list[str]:
    """IPv4 addresses of a name; none if it does not resolve (it may still be an ssh alias)."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_local(host: str) -> bool:
    """Whether the name stands for this machine: only its own addresses can be bound."""
    for address in addresses_of(host):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return True
    return False


def machine_identity() -> str:
    """A host id, equal for processes that share a host. Names are not enough: containers often have the same
    one."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8])
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))  # a container has addresses of its own
    return "/".join(parts)


def interface_addresses() -> dict[str, str]:
    """Interface name -> its IPv4 address, of the interfaces that have one."""
    return _ask_interfaces(_SIOCGIFADDR)


def _ask_interfaces(question: int) -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(query.fileno(), question, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def common_subnet(hosts: list[str]) -> str | None:
    """`10.0.0.0/24` if one of our networks has all these hosts in it."""
    wanted = [addresses_of(host) or addresses_of(_ssh_hostname(host)) for host in hosts]
    masks = _ask_interfaces(_SIOCGIFNETMASK)
    for name, address in interface_addresses().items():
        subnet = ipaddress.ip_network(f"{address}/{masks.get(name, 32)}", strict=False)
        if not subnet.is_loopback and all(
            any(ipaddress.ip_address(found) in subnet for found in addresses) for addresses in wanted
        ):
            return str(subnet)
    return None


def loopback_interface() -> str:
    for name, address in interface_addresses().items():
        if address == "127.0.0.1":
            return name
    return "lo"


def address_towards(host: str) -> str:
    """Our address on the route to `host`; connecting a UDP socket sends nothing."""
    targets = addresses_of(host) or addresses_of(_ssh_hostname(host))
    for target in targets:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def serving_address(host: str) -> str:
    """The address to listen on for ranks that look for this machine under the name `host`.

    Empty, which means all addresses until the ranks have arrived, if the name does not tell: many machines
    give their own name a loopback address (127.0.1.1), which is useless to other hosts.
    """
    found = addresses_of(host)
    ours = [address for address in found if is_local(address)]
    for plain in (host, "127.0.0.1"):  # an address, or localhost: then all ranks are here
        if plain in ours:
            return plain
    if any(address.startswith("127.") for address in ours):
        return ""  # ranks on this machine use the loopback address, others do not
    if ours:
        return ours[0]
    # The name of a service or a proxy that passes connections on to us.
    return address_towards(host) if found else ""


def _ssh_hostname(host: str) -> str:
    """The host name that ssh's configuration maps it to."""
    try:
        answer = subprocess.run(["ssh", "-G", host], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return host
    for line in answer.stdout.splitlines():
        if line.startswith("hostname "):
            return line.split(None, 1)[1]
    return host
