"""Ports for servers that a script starts."""

import random
import socket

# Ports below this one are for known services.
LOWEST_PORT = 10_000


def free_ports(count, ranks=1):
    """Bases of `count` runs of `ranks` TCP ports that were free a moment ago.

    They lie below the ports that the kernel gives to connections out of this machine: one of those would fail a
    server's bind.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        lowest_of_outgoing = int(file.read().split()[0])
    while True:
        bases = sorted(random.sample(range(LOWEST_PORT, lowest_of_outgoing - ranks), count))
        apart = all(one + ranks <= other for one, other in zip(bases, bases[1:]))
        if apart and all(is_free(base + rank) for base in bases for rank in range(ranks)):
            return bases


def is_free(port):
    with socket.socket() as held:
        try:
            held.bind(("", port))
        except OSError:
            return False
        return True
