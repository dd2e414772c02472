"""The address of a server: taken before a model is loaded, so that one that cannot be had is known at once."""

from __future__ import annotations

import errno
import os
import socket

_BACKLOG = 2048  # connections that wait to be accepted, as in uvicorn
_ADVICE = {
    errno.EADDRINUSE: "it is in use: stop the server that has it, or choose another port (--port)",
    errno.EACCES: "this user may not: choose a port of 1024 or more (--port)",
    errno.EADDRNOTAVAIL: "give a name or address of this machine (--host)",
}


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at every address of a host, all at one port; no other process can then have it.

    Args:
        host: a name or an address, "" for all interfaces.
        port: 0 for any that is free.

    Raises:
        OSError: no address of this machine, or the port is in use; the message is a sentence that says what to do.
        ValueError: no port has this number.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"A port is a number from 0 to 65535, not {port}.")
    try:
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise OSError(
            f"Cannot serve at {address(host, port)}: the host is not known: give a name or address of this machine (--host)."
        ) from None
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, where in dict.fromkeys(places):
        try:
            taken = sockets[0].getsockname()[1] if sockets else port
            # connections of an earlier server do not hold the port; but no two sockets listen at one
            sockets.append(socket.create_server((where[0], taken, *where[2:]), family=family, backlog=_BACKLOG))
            sockets[-1].setblocking(False)
        except OSError as error:
            failure = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # a kind of address that is switched off
                break
    else:
        if sockets:
            return sockets
    for listening in sockets:
        listening.close()
    number = failure.errno if failure is not None and failure.errno is not None else errno.EADDRNOTAVAIL
    raise OSError(f"Cannot serve at {address(host, port)}: {_ADVICE.get(number, os.strerror(number))}.") from failure


def address(host: str, port: int) -> str:
    """`host:port`, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
