"""ResponseStore: responses in files."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

from ...core.folders import write_private
from .errors import ApiError, failed

_ID = re.compile("resp_[0-9a-f]{32}")


class ResponseStore:
    """Responses in files, a folder for each space (API key). Any thread may call its methods. One server should use a
    folder: two do not count each other's files, and one that starts removes what the other is writing.

    Args:
        most_bytes: maximum size of all files together. The oldest go first.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: str | Path, most_bytes: int):
        self.folder, self.most_bytes = Path(folder).expanduser(), most_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for unfinished in self.folder.glob("*/resp_*.json.*.partial"):
            unfinished.unlink(missing_ok=True)
        files = (file for file in self.folder.glob("*/*.json") if _ID.fullmatch(file.stem) and file.is_file())
        known = sorted((file.stat().st_mtime, file) for file in files)
        self._sizes = {file: file.stat().st_size for _, file in known}  # the oldest first
        self._total = sum(self._sizes.values())
        self._lock = threading.Lock()
        self._shrink()

    def _file(self, space: str, id: str) -> Path:
        if not _ID.fullmatch(id):
            raise _unknown(id)
        return self.folder / (space or "all") / f"{id}.json"

    def save(self, space: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Store a response and the items that it answers. Raises ApiError: 500, it cannot be written."""
        file = self._file(space, response["id"])
        content = json.dumps({"response": response, "input": items}).encode()
        try:
            if len(content) > self.most_bytes:
                raise OSError(f"it has {len(content)} bytes, and --store-bytes is {self.most_bytes}")
            write_private(file, content)
        except OSError as error:
            raise failed(f"The response cannot be stored: {error.strerror or error}. Send store: false.") from None
        with self._lock:
            self._sizes[file] = len(content)
            self._total += len(content)
            self._shrink()

    def _shrink(self) -> None:
        while self._total > self.most_bytes:
            oldest = next(iter(self._sizes))
            self._total -= self._sizes.pop(oldest)
            oldest.unlink(missing_ok=True)

    def load(self, space: str, id: str) -> dict[str, Any]:
        """A stored "response" and the "input" items that it answers. Raises ApiError: 404, this space has none of this id; 500, its file
        is broken."""
        try:
            stored = json.loads(self._file(space, id).read_bytes())
            _ = [item["id"] for item in (*stored["input"], *stored["response"]["output"])]
            return stored
        except FileNotFoundError:
            raise _unknown(id) from None
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise failed(f"The stored response {id} cannot be read: {error!r}.") from None

    def delete(self, space: str, id: str) -> None:
        """Delete a stored response. Raises ApiError: 404, this space has none of this id."""
        file = self._file(space, id)
        with self._lock:
            self._total -= self._sizes.pop(file, 0)
            try:
                file.unlink()
            except FileNotFoundError:
                raise _unknown(id) from None


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"There is no stored response {id!r}.", code="response_not_found")
