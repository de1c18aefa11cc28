"""Downloads one file from a hub over HTTP: resumes after an interruption, even in a later process, and checks its hash.

huggingface_hub gives each process a partial file of its own, which the next one does not find, also with xet; and it
compares sizes, not hashes. Measured with 2.4.0, 2026-11, two cores, a server on the same machine, a file of 419 MB:

|                                          | this loop | hf_hub_download |
|------------------------------------------|-----------|-----------------|
| whole file, less the start of Python     | 155 MB/s  | 240 MB/s        |
| killed at half, run again: bytes fetched | 210 MB    | 419 MB          |
| last byte differs from the hub's hash    | refused   | accepted        |

So this loop stays; it is faster than most lines. It uses huggingface_hub's session, headers and errors.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from mlcpipe.errors import DownloadError
from mlcpipe.support.atomic import only_writer
from mlcpipe.support.json_files import shown, shown_path
from mlcpipe.support.progress import Progress

if TYPE_CHECKING:
    import httpx2

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 30.0
MAX_FRUITLESS_ATTEMPTS = 5  # in a row without a new byte
MAX_REDIRECTS = 10
RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class RemoteFile:
    """A file that the hub lists. `digest` in hex: 64 digits are sha256 (LFS), 40 are git's blob sha1."""

    name: str
    url: str
    size: int
    digest: str


def fetch_file(remote: RemoteFile, blob: Path, progress: Progress, *, pause_seconds: float = 1.0) -> None:
    """Downloads `remote` to `blob`, resuming an earlier call; `blob` appears complete and verified.

    `progress` advances by the bytes present, including those of the earlier call. Raises DownloadError
    after `MAX_FRUITLESS_ATTEMPTS` in a row without a new byte and for content that differs from the hub's list,
    huggingface_hub's HfHubHTTPError when the hub refuses, OSError when the disk does.
    """
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    path = blob.with_name(f"{blob.name}.mlcpipe-partial")
    busy = DownloadError(
        f"another process is downloading {shown(remote.name)}",
        where=shown_path(path),
        next_step="wait for it, then run the command again",
    )
    with only_writer(path, busy), _Partial(path, remote) as partial:
        progress.advance(partial.size)
        fruitless, most = 0, partial.size
        while partial.size < remote.size:
            problem: object = "the connection ended early"
            try:
                _stream(remote, partial, progress)
            except httpx2.TransportError as error:
                problem = error or type(error).__name__
            except HfHubHTTPError as error:
                if error.response.status_code not in RETRIED_STATUSES:
                    raise
                problem = f"HTTP status {error.response.status_code}"
            fruitless, most = (0, partial.size) if partial.size > most else (fruitless + 1, most)
            if fruitless >= MAX_FRUITLESS_ATTEMPTS:
                raise DownloadError(
                    f"the download of {shown(remote.name)} stalled",
                    where=repr(remote.url),
                    expected=f"{remote.size} bytes",
                    found=f"{partial.size} bytes, then: {problem}",
                    next_step="run the command again to resume",
                )
            if partial.size < remote.size:
                time.sleep(pause_seconds * fruitless)
        partial.verify()
    os.replace(path, blob)


class _Partial:
    """The downloaded part of a file and its running hash."""

    def __init__(self, path: Path, remote: RemoteFile) -> None:
        self._remote = remote
        self._file = path.open("ab+")
        self.size = 0

    def __enter__(self) -> _Partial:
        try:
            self.reset(keep=True)
            self._file.seek(0)
            while chunk := self._file.read(CHUNK_BYTES):
                self._hash.update(chunk)
                self.size += len(chunk)
            if self.size > self._remote.size:
                self.reset()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, chunk: bytes) -> None:
        if self.size + len(chunk) > self._remote.size:
            self._reject(f"more than {self._remote.size} bytes")
        self._file.write(chunk)
        self._hash.update(chunk)
        self.size += len(chunk)

    def reset(self, *, keep: bool = False) -> None:
        """Starts over; with `keep`, only the hash is reset and the file stays."""
        if not keep:
            self._file.truncate(0)
        self.size = 0
        self._hash = hashlib.sha256() if len(self._remote.digest) == 64 else hashlib.sha1()
        if len(self._remote.digest) == 40:  # git hashes a header before the content
            self._hash.update(b"blob %d\0" % self._remote.size)

    def verify(self) -> None:
        if self._hash.hexdigest() != self._remote.digest:
            self._reject(f"content with hash {self._hash.hexdigest()}")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _reject(self, found: str) -> None:
        self.reset()
        raise DownloadError(
            f"the hub sent different content for {shown(self._remote.name)}",
            where=shown(self._remote.url),
            expected=f"{self._remote.size} bytes with hash {self._remote.digest}",
            found=found,
            next_step="run the command again; if the error persists, do not trust this source",
        )


def read_range(remote: RemoteFile, start: int, count: int) -> bytes:
    """`count` bytes of a file from `start` on, or fewer at its end; a hub may answer with more, which is not read.

    Raises httpx2's TransportError and huggingface_hub's HfHubHTTPError.
    """
    content = bytearray()
    with _answer(remote.url, {"Range": f"bytes={start}-{start + count - 1}"}) as response:
        _check_status(response)
        before = 0 if response.status_code == 206 else start  # a hub without ranges sends all
        for chunk in response.iter_bytes(CHUNK_BYTES):
            content += chunk
            if len(content) >= before + count:
                break
    return bytes(content[before : before + count])


def read_answer(url: str, max_bytes: int, max_s: float) -> bytes | None:
    """The body of a hub's answer, None if it is longer. It takes `max_s`, from the first byte asked to the last.

    Raises httpx2's TransportError, also for an answer that takes longer, and huggingface_hub's HfHubHTTPError.
    """
    import httpx2

    found: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()

    def read() -> None:
        content = bytearray()
        try:
            with _answer(url, {}) as response:
                _check_status(response)
                for chunk in response.iter_bytes(CHUNK_BYTES):
                    content += chunk
                    if len(content) > max_bytes:
                        return found.put(None)
            found.put(bytes(content))
        except BaseException as error:
            found.put(error)

    # Each read has its own time limit, which every byte restarts; only another thread can bound the whole answer.
    threading.Thread(target=read, daemon=True).start()
    try:
        answer = found.get(timeout=max_s)
    except queue.Empty:
        raise httpx2.ReadTimeout(f"no whole answer in {max_s:g} s") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


@contextmanager
def _answer(url: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
    """A hub's answer, its body unread; a redirect's body is never read, as it may be endless.

    Raises httpx2's HTTPError.
    """
    import httpx2
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, but lazy

    session: httpx2.Client = get_session()
    # Sizes and offsets of a compressed response differ from the file's.
    headers = {**build_hf_headers(library_name="mlcpipe"), "Accept-Encoding": "identity", **headers}
    request = session.build_request("GET", url, headers=headers, timeout=TIMEOUT_SECONDS)
    for _ in range(MAX_REDIRECTS):
        response = session.send(request, stream=True, follow_redirects=False)
        with contextlib.closing(response):
            if response.next_request is None:
                yield response
                return
        request = response.next_request
    raise httpx2.TooManyRedirects(f"more than {MAX_REDIRECTS} redirects", request=request)


def _check_status(response: httpx2.Response) -> None:
    """Raise huggingface_hub's HfHubHTTPError for a refusal. Its body is not read, as it may be endless."""
    import httpx2
    from huggingface_hub import hf_raise_for_status

    hf_raise_for_status(httpx2.Response(response.status_code, headers=response.headers, request=response.request))


def _stream(remote: RemoteFile, partial: _Partial, progress: Progress) -> None:
    with _answer(remote.url, {"Range": f"bytes={partial.size}-"} if partial.size else {}) as response:
        misplaced = response.status_code == 206 and not response.headers.get("Content-Range", "").startswith(
            f"bytes {partial.size}-"
        )
        if misplaced or response.status_code == 416:
            progress.advance(-partial.size)
            partial.reset()
            return  # the next attempt requests the whole file
        _check_status(response)
        if response.status_code != 206:  # the whole file, requested or not
            progress.advance(-partial.size)
            partial.reset()
        for chunk in response.iter_bytes(CHUNK_BYTES):
            partial.append(chunk)
            progress.advance(len(chunk))
