"""Where a bundle comes from: compiled here, signed by a publisher that the user trusts, or neither.

The user's configuration folder has trusted keys, `publishers/NAME.pub` in minisign's format, and `bundles/`: an empty
file, named by the SHA-256 of its manifest, for each bundle that was compiled here or accepted. The manifest has the
hash of every file, so these files stand for the whole bundle, wherever it is copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.bundle.manifest import MANIFEST, MAX_MANIFEST_BYTES, TargetInfo
from mlcpipe.bundle.minisign import MAX_BYTES, PublicKey, Signature, parse_public_key
from mlcpipe.errors import BundleError, ForeignBundleWarning, SignatureError
from mlcpipe.support.env import env
from mlcpipe.support.files import read_bounded
from mlcpipe.support.generated import shell_word
from mlcpipe.support.json_files import shown
from mlcpipe.support.private import check_private, private_folder

SIGNATURE = f"{MANIFEST}.minisig"


@dataclass(frozen=True)
class Origin:
    """`publisher`: the trusted one with a valid signature; `signer`: the key number that any signature states."""

    accepted: bool
    publisher: str | None = None
    signer: str | None = None

    @property
    def known(self) -> bool:
        """Whether the bundle may run without a warning."""
        return self.accepted or self.publisher is not None

    def __str__(self) -> str:
        if self.publisher is not None:
            return f"signed by {self.publisher} ({self.signer})"
        signed = "not signed" if self.signer is None else f"claims the unknown key {self.signer} (not checked)"
        return f"{signed}, compiled or accepted here" if self.accepted else signed


def origin_of(directory: Path) -> Origin:
    """The origin of a bundle. Raises SignatureError for an unreadable signature, or an invalid one of a trusted key."""
    content = read_bounded(directory / MANIFEST, MAX_MANIFEST_BYTES, BundleError)
    record = _record(content)
    accepted = record is not None and record.is_file()
    if record is not None and accepted:
        check_private(record, record.parents[1], SignatureError)
    path = directory / SIGNATURE
    if not path.exists():
        return Origin(accepted)
    try:
        signature = Signature.parse(read_bounded(path, MAX_BYTES, SignatureError))
        signer = PublicKey(signature.number, b"")
        for name, key in publishers().items():
            if key.number == signature.number:
                signature.check(content, key)
                return Origin(accepted, name, key.identity)
    except SignatureError as error:
        raise SignatureError(
            error.what, where=path, expected=error.expected, found=error.found,
            next_step=error.next_step or "do not use this bundle",
        ) from error  # fmt: skip
    return Origin(accepted, signer=signer.identity)


def note_foreign(directory: Path, target: TargetInfo, use: str, stacklevel: int = 1) -> None:
    """Warn of a bundle of unknown origin, before the `use` of its code. Raises the errors of `origin_of`."""
    origin = origin_of(directory)
    if not origin.known:
        what, accepts = f"{shown(target.name)} on {shown(target.triple)}", f"mlcpipe trust {shell_word(directory)}"
        line = f"this {use} the native code of {directory}, for {what}, {origin}; `{accepts}` accepts it"
        warnings.warn(ForeignBundleWarning(line), stacklevel=stacklevel)


def accept(directory: Path) -> bool:
    """Record that a bundle may run, as compiling it here does. False if that cannot be stored."""
    record = _record(read_bounded(directory / MANIFEST, MAX_MANIFEST_BYTES, BundleError))
    with contextlib.suppress(OSError):
        if record is not None:
            private_folder(record.parent)
            record.touch(mode=0o600)
            return True
    return False


def forget(directory: Path) -> None:
    """Undo `accept`."""
    record = _record(read_bounded(directory / MANIFEST, MAX_MANIFEST_BYTES, BundleError))
    if record is not None:
        record.unlink(missing_ok=True)


def publishers() -> dict[str, PublicKey]:
    """The trusted keys by the publisher's name. Raises SignatureError for another file, or one that others wrote."""
    folder = publishers_folder()
    keys = {}
    for path in sorted(folder.glob("*.pub")) if folder is not None else ():
        check_private(path, path.parents[1], SignatureError)
        keys[path.stem] = parse_public_key(read_bounded(path, MAX_BYTES, SignatureError))
    return keys


def publishers_folder() -> Path | None:
    """The folder of trusted keys; None for a user without a home."""
    config = env().config
    return config / "publishers" if config else None


def _record(manifest: bytes) -> Path | None:
    config = env().config
    return config / "bundles" / hashlib.sha256(manifest).hexdigest() if config else None
