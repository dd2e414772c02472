"""Images that a request names by their address: from which hosts they are fetched, and how much of them is read."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import SplitResult, urljoin, urlsplit

from .errors import bad_request

_SECONDS = 10.0  # for all images of a request
_MOST_REDIRECTS = 3
_MOST_AT_ONCE = 8  # requests whose images are fetched; the next one waits
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last four bytes are an IPv4 address


class Media:
    """Fetches images, off the event loop.

    Args:
        hosts: names of the hosts from which images are fetched; "*" stands for every name. A private address is reached only if it is
            listed itself, so that no name and no redirect leads into the server's own network.
        most_bytes: of all images of a request.
    """

    def __init__(self, hosts: list[str], most_bytes: int):
        self.hosts, self.most_bytes = frozenset(host.lower() for host in hosts), most_bytes
        # of its own: slow hosts must not delay answers
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE, "hf-specdec-media")

    async def fetch(self, urls: set[str]) -> dict[str, bytes]:
        """The contents of these addresses. Raises ApiError: 400, one of them cannot be fetched."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._fetch, urls) if urls else {}

    def _fetch(self, urls: set[str]) -> dict[str, bytes]:
        fetched: dict[str, bytes] = {}
        deadline = time.monotonic() + _SECONDS
        for url in urls:
            try:
                fetched[url] = self._get(url, self.most_bytes - sum(map(len, fetched.values())), deadline)
            except (OSError, ValueError, http.client.HTTPException) as error:
                late = time.monotonic() >= deadline
                reason = f"its host took longer than {_SECONDS:.0f} s" if late else str(error) or type(error).__name__
                raise bad_request(f"image_url: {url[:100]!r} cannot be fetched: {reason}.", "messages") from None
        return fetched

    def _get(self, url: str, most_bytes: int, deadline: float) -> bytes:
        """The contents of one address, and of those that it redirects to."""
        for _ in range(1 + _MOST_REDIRECTS):
            parts = urlsplit(url)
            with self._connected(parts, deadline) as connection:
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "hf-specdec"})
                answer = connection.getresponse()
                location = answer.headers.get("Location")
                if answer.status in (301, 302, 303, 307, 308) and location is not None:
                    url = urljoin(url, location)
                    continue
                if answer.status != 200:
                    raise ValueError(f"its host answers with status {answer.status}")
                contents = answer.read(most_bytes + 1)
                if time.monotonic() >= deadline:  # without a header for the length, what was shut seems complete
                    raise TimeoutError
                if len(contents) > most_bytes:
                    raise ValueError(f"the images of a request may have {self.most_bytes} bytes (--max-body-bytes)")
                return contents
        raise ValueError(f"it redirects more than {_MOST_REDIRECTS} times")

    @contextlib.contextmanager
    def _connected(self, parts: SplitResult, deadline: float) -> Iterator[http.client.HTTPConnection]:
        """A connection to an allowed host, at an address that has been checked; it is shut when the time is over."""
        host, is_secure = parts.hostname, parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError("an image has an address that begins with https://, http:// or data:")
        if self.hosts.isdisjoint((host, "*")):
            raise ValueError(f"{host} is not among --allowed-media-hosts")
        port = parts.port or (443 if is_secure else 80)
        # not by name a second time: the answer could be another
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if host not in self.hosts or host != address[0]:
            _refuse_private(host, str(address[0]))
        with contextlib.ExitStack() as at_end:
            end = at_end.enter_context(socket.socket(family, kind, protocol))
            end.settimeout(max(0.01, deadline - time.monotonic()))
            end.connect(address)
            if is_secure:
                secure = ssl.create_default_context().wrap_socket
                end = at_end.enter_context(secure(end, server_hostname=host, do_handshake_on_connect=False))
            # A timeout of a socket is for one read, and there may be many, also while the first write agrees on keys.
            left = max(0.0, deadline - time.monotonic())
            timer = threading.Timer(left, _shut, (end,))
            timer.start()
            at_end.callback(timer.cancel)
            # Its class chooses the header Host, which signatures of addresses may cover.
            connection = (http.client.HTTPSConnection if is_secure else http.client.HTTPConnection)(host, port)
            connection.sock = end
            yield connection


def _shut(end: socket.socket) -> None:
    """Wake a thread that reads. The method of ssl would forget its state meanwhile."""
    with contextlib.suppress(OSError):  # the other end has been faster
        socket.socket.shutdown(end, socket.SHUT_RDWR)


def _refuse_private(host: str, address: str) -> None:
    """Raise ValueError for an address that is not one of the public internet's."""
    number = ipaddress.ip_address(address)
    if isinstance(number, ipaddress.IPv6Address):
        inner = number.ipv4_mapped or number.sixtofour
        number = ipaddress.IPv4Address(int(number) & 0xFFFFFFFF) if number in _NAT64 else inner or number
    if not number.is_global or number.is_multicast:
        raise ValueError(f"{host} has a private address")
