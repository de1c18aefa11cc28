"""Responses that clients continue or get again, in a file that outlives the server: SQLite, as many as fit."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mlcpipe.errors import UsageError
from mlcpipe.server.errors import ApiError
from mlcpipe.server.response_store import MAX_BYTES, MAX_RESPONSES, ResponseStore, Stored, ids_of

BUSY_S = 5.0  # that a request waits for another server's
_APPLICATION, _VERSION = 0x6D6C6370, 1  # "mlcp", and of the tables
_MODE = 0o600
_WAL_BYTES = 16 << 20  # that its log keeps on the disk
_TABLES = (
    "CREATE TABLE responses (number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, previous TEXT, "
    "json_bytes INTEGER NOT NULL, nbytes INTEGER NOT NULL, used INTEGER NOT NULL, UNIQUE (owner, id))",
    "CREATE INDEX by_use ON responses (owner, used, nbytes)",
    "CREATE TABLE contents (number INTEGER PRIMARY KEY REFERENCES responses ON DELETE CASCADE, items TEXT NOT NULL, "
    "response TEXT NOT NULL)",  # apart, as each use writes a row of `responses`
    "CREATE TABLE places (owner TEXT NOT NULL, item TEXT NOT NULL, number INTEGER NOT NULL "
    "REFERENCES responses ON DELETE CASCADE, PRIMARY KEY (owner, item)) WITHOUT ROWID",
    "CREATE INDEX by_number ON places (number)",
)
_NEXT = "1 + (SELECT COALESCE(MAX(used), 0) FROM responses WHERE owner = ?)"
_FIND = (
    "SELECT number, previous, json_bytes, nbytes, items, response FROM responses JOIN contents USING (number) "
    "WHERE owner = ? AND id = ?"
)
_log = logging.getLogger("mlcpipe.server")
_T = TypeVar("_T")


class ResponseFile(ResponseStore):
    """As `ResponseStore`, in a file of this user alone, which several servers may share: each `ask` is one transaction,
    in one thread. What was kept is there after the process is killed.
    """

    def __init__(self, path: Path, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        """Make the file, or open it. Raises UsageError for one that is damaged, another program's or open to others."""
        super().__init__(most, most_bytes)
        self._db = _opened(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlcpipe-responses")

    def close(self) -> None:
        """Last call: what was asked is done first."""
        self._thread.shutdown()
        self._db.close()

    async def ask(self, work: Callable[[ResponseStore], _T]) -> _T:
        """As there. Raises ApiError also where the file cannot be read or written."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._at_once, work)

    def _at_once(self, work: Callable[[ResponseStore], _T]) -> _T:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                made = work(self)
                self._db.execute("COMMIT")
                return made
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
        except sqlite3.Error as error:
            _log.error("the file of stored responses: %s", error)
            message = f"stored responses cannot be read or written: {error}"
            raise ApiError(503, message, code="store_failed", retry_after_s=1.0) from None

    def put(self, owner: str, name: str, value: Stored) -> bool:
        """As `OwnedStore`."""
        if value.nbytes > self.most_bytes:
            return False
        run, sizes = self._db.execute, (value.json_bytes, value.nbytes)
        run("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, name))
        added = run(
            f"INSERT INTO responses VALUES (NULL, ?, ?, ?, ?, ?, {_NEXT})", (owner, name, value.previous, *sizes, owner)
        )
        number, items = added.lastrowid, ",".join(map(json.dumps, value.items))  # each alone: other threads run between
        run("INSERT INTO contents VALUES (?, ?, ?)", (number, f"[{items}]", json.dumps(value.response)))
        places = ((owner, one, number) for one in ids_of(value))
        self._db.executemany("INSERT OR REPLACE INTO places VALUES (?, ?, ?)", places)
        self._counts, self._nbytes = Counter(), Counter()  # another server may have added some
        for one, count, nbytes in run("SELECT owner, COUNT(*), SUM(nbytes) FROM responses GROUP BY owner"):
            self._counts[one], self._nbytes[one] = count, nbytes
        self._make_room()
        return True

    def found(self, owner: str, name: str) -> Stored | None:
        """As `OwnedStore`."""
        row = self._db.execute(_FIND, (owner, name)).fetchone()
        if row is None:
            return None
        number, previous, json_bytes, nbytes, *texts = row
        self._db.execute(f"UPDATE responses SET used = {_NEXT} WHERE number = ?", (owner, number))
        try:
            items, response = map(json.loads, texts)
        except (TypeError, ValueError):
            raise sqlite3.DatabaseError(f"response {number} is damaged; delete it") from None
        return Stored(response, items, previous, json_bytes, nbytes)

    def has(self, owner: str, name: str) -> bool:
        """As there."""
        return self._one("SELECT 1 FROM responses WHERE owner = ? AND id = ?", (owner, name)) is not None

    def delete(self, owner: str, name: str) -> None:
        """As `OwnedStore`; its content is not read, which may be damaged."""
        if not self.has(owner, name):
            self.get(owner, name)
        self._drop((owner, name))

    def _place_of(self, owner: str, item: str) -> str | None:
        found: str | None = self._one(
            "SELECT id FROM places JOIN responses USING (number) WHERE places.owner = ? AND item = ?", (owner, item)
        )
        return found

    def _oldest(self, owner: str) -> str:
        oldest: str = self._one("SELECT id FROM responses WHERE owner = ? ORDER BY used LIMIT 1", (owner,))
        return oldest

    def _drop(self, place: tuple[str, str]) -> None:
        self._nbytes[place[0]] -= self._one("SELECT nbytes FROM responses WHERE owner = ? AND id = ?", place)
        self._counts[place[0]] -= 1
        self._db.execute("DELETE FROM responses WHERE owner = ? AND id = ?", place)

    def _one(self, query: str, given: tuple[str, ...]) -> Any:
        row = self._db.execute(query, given).fetchone()
        return None if row is None else row[0]


def _opened(path: Path) -> sqlite3.Connection:
    """Raises UsageError; a file that is refused stays as it is."""
    try:
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _MODE))
        status = path.stat()
    except OSError as error:
        raise _refused(path, "a file that can be written", error.strerror) from None
    if not stat.S_ISREG(status.st_mode):
        raise _refused(path, "a file", "no regular file")
    if os.name == "posix" and (mode := stat.S_IMODE(status.st_mode)) & ~_MODE:
        raise _refused(path, "a file of its owner alone, mode 0600", f"mode {mode:04o}", "chmod 600 it")
    try:
        db = sqlite3.connect(path.absolute(), timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            _prepare(db, path)
        except BaseException:
            db.close()
            raise
    except sqlite3.Error as error:
        raise _refused(path, "a database of stored responses", error) from None
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Check the tables, or make them in a file that is empty. Raises UsageError, sqlite3.Error."""
    ours = "a file that mlcpipe serve wrote"
    application, version, tables = _form(db)
    if application != _APPLICATION and (application or version or tables):
        raise _refused(path, ours, "another program's database")
    if application == _APPLICATION and version != _VERSION:
        raise _refused(path, f"version {_VERSION}", f"version {version}, of another mlcpipe")
    for setting in ("foreign_keys = ON", "secure_delete = ON", "trusted_schema = OFF", "synchronous = NORMAL"):
        db.execute(f"PRAGMA {setting}")
    if db.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
        raise _refused(path, "a disk with shared memory for SQLite's WAL", "another one")
    db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    db.execute("BEGIN IMMEDIATE")
    if not _form(db)[2]:  # nor has another server made them meanwhile
        for statement in (*_TABLES, f"PRAGMA application_id = {_APPLICATION}", f"PRAGMA user_version = {_VERSION}"):
            db.execute(statement)
    db.execute("COMMIT")
    (result,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if result != "ok" or _form(db) != (_APPLICATION, _VERSION, sorted(_TABLES)):
        raise _refused(path, ours, "damage" if result != "ok" else "other tables")


def _form(db: sqlite3.Connection) -> tuple[int, int, list[str]]:
    """The application, its version, and the statements that made the tables."""
    (application,), (version,) = (db.execute(f"PRAGMA {one}").fetchone() for one in ("application_id", "user_version"))
    return application, version, sorted(sql for (sql,) in db.execute("SELECT sql FROM sqlite_master") if sql)


def _refused(path: Path, expected: str, found: object, next_step: str = "name another, or move it away") -> UsageError:
    return UsageError("--responses-store", where=path, expected=expected, found=found, next_step=next_step)
