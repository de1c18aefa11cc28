"""Keys and signatures in minisign's format: Ed25519 over the BLAKE2b-512 of the content, and over a comment.

Format: https://jedisct1.github.io/minisign/#signature-format. `minisign -V -p KEY.pub -m mlcpipe.json` checks the same
file, and a key of `minisign -G` signs here too. Every function raises SignatureError for input that it cannot read.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlcpipe.errors import SignatureError

MAX_BYTES = 4096  # of a key or signature file
_KEY, _PREHASHED = b"Ed", b"ED"
_SCRYPT, _PLAIN, _CHECKSUM = b"Sc", b"\0\0", b"B2"
_KDF = struct.Struct("<32sQQ")  # salt, operations, bytes of memory
_MAX_KDF_BYTES = (2 << 30) - 1
_COMMENT = "trusted comment: "


@dataclass(frozen=True)
class PublicKey:
    """A key that checks signatures: its number, 8 bytes, and its point, 32 bytes."""

    number: bytes
    point: bytes

    @property
    def identity(self) -> str:
        """The key's number as minisign writes it."""
        return self.number[::-1].hex().upper()

    @property
    def text(self) -> str:
        """The line to publish."""
        return base64.b64encode(_KEY + self.number + self.point).decode()

    @property
    def file_text(self) -> str:
        """The content of its file."""
        return f"untrusted comment: minisign public key {self.identity}\n{self.text}\n"


@dataclass(frozen=True)
class SecretKey:
    """A key that signs."""

    public: PublicKey
    seed: bytes

    @staticmethod
    def make() -> SecretKey:
        """A new key."""
        return SecretKey._of(secrets.token_bytes(8), secrets.token_bytes(32))

    @staticmethod
    def _of(number: bytes, seed: bytes) -> SecretKey:
        private = _ed25519().Ed25519PrivateKey.from_private_bytes(seed)
        return SecretKey(PublicKey(number, private.public_key().public_bytes_raw()), seed)

    @staticmethod
    def parse(text: bytes, password: Callable[[], str]) -> SecretKey:
        """A key file, with a password (asked for only then) or without."""
        raw = _decoded(_lines(text, 2, "secret key")[1], 158, "secret key")
        kdf, body = raw[2:4], raw[54:]
        if raw[:2] != _KEY or kdf not in (_SCRYPT, _PLAIN) or raw[4:6] != _CHECKSUM:
            raise _unreadable("secret key")
        if kdf == _SCRYPT:
            stream = _scrypt(password().encode(), *_KDF.unpack(raw[6:54]))
            body = bytes(a ^ b for a, b in zip(body, stream, strict=True))
            if hashlib.blake2b(_KEY + body[:72], digest_size=32).digest() != body[72:]:
                raise SignatureError("wrong password for the secret key")
        return SecretKey._of(body[:8], body[8:40])

    @property
    def file_text(self) -> str:
        """The content of its file, without a password, as `minisign -G -W` writes it."""
        head = _KEY + _PLAIN + _CHECKSUM + _KDF.pack(bytes(32), 0, 0)
        body = self.public.number + self.seed + self.public.point
        checksum = hashlib.blake2b(_KEY + body, digest_size=32).digest()
        return f"untrusted comment: minisign secret key\n{base64.b64encode(head + body + checksum).decode()}\n"

    def sign(self, content: bytes, file_name: str) -> str:
        """The content of the signature's file."""
        private = _ed25519().Ed25519PrivateKey.from_private_bytes(self.seed)
        signature = private.sign(hashlib.blake2b(content).digest())
        comment = f"timestamp:{int(time.time())}\tfile:{file_name}\thashed"
        first = base64.b64encode(_PREHASHED + self.public.number + signature).decode()
        second = base64.b64encode(private.sign(signature + comment.encode())).decode()
        return f"untrusted comment: signature of an mlcpipe bundle\n{first}\n{_COMMENT}{comment}\n{second}\n"


@dataclass(frozen=True)
class Signature:
    """A parsed signature; `number` is that of its key."""

    number: bytes
    signature: bytes
    comment: bytes
    comment_signature: bytes

    @staticmethod
    def parse(text: bytes) -> Signature:
        """The signature in the text of its file."""
        lines = _lines(text, 4, "signature")
        raw = _decoded(lines[1], 74, "signature")
        if raw[:2] != _PREHASHED or not lines[2].startswith(_COMMENT):
            raise _unreadable("signature")
        comment = lines[2][len(_COMMENT) :].encode()
        return Signature(raw[2:10], raw[10:], comment, _decoded(lines[3], 64, "signature"))

    def check(self, content: bytes, key: PublicKey) -> None:
        """Raise SignatureError unless `key` made this signature of `content` and of the comment."""
        public = _ed25519().Ed25519PublicKey.from_public_bytes(key.point)
        from cryptography.exceptions import InvalidSignature

        try:
            public.verify(self.signature, hashlib.blake2b(content).digest())
            public.verify(self.comment_signature, self.signature + self.comment)
        except InvalidSignature:
            raise SignatureError("the signature does not hold", found=f"key {key.identity}") from None


def parse_public_key(text: bytes) -> PublicKey:
    """A public key's file, or its line alone."""
    lines = _lines(text, 1, "public key")
    raw = _decoded(lines[min(1, len(lines) - 1)], 42, "public key")
    if raw[:2] != _KEY:
        raise _unreadable("public key")
    return PublicKey(raw[2:10], raw[10:])


def _lines(text: bytes, count: int, what: str) -> list[str]:
    try:
        lines = text.decode().splitlines()
    except UnicodeDecodeError:
        lines = []
    if len(lines) < count:
        raise _unreadable(what)
    return lines


def _decoded(line: str, size: int, what: str) -> bytes:
    try:
        raw = base64.b64decode(line.strip(), validate=True)
    except ValueError:
        raw = b""
    if len(raw) != size:
        raise _unreadable(what)
    return raw


def _unreadable(what: str) -> SignatureError:
    return SignatureError(f"the {what} cannot be read", expected="minisign's format, not its legacy one")


def _scrypt(password: bytes, salt: bytes, operations: int, memory: int) -> bytes:
    """104 bytes, with the parameters that libsodium's pickparams (crypto_pwhash_scryptsalsa208sha256) takes."""
    operations = max(operations, 32768)
    log_n = max((min(operations // 32, memory // 1024) // 2).bit_length(), 1)
    p = min(operations // 4 >> log_n, 0x3FFFFFFF) // 8
    try:
        return hashlib.scrypt(password, salt=salt, n=1 << log_n, r=8, p=p, maxmem=_MAX_KDF_BYTES, dklen=104)
    except ValueError:  # more memory or time than minisign asks for
        raise _unreadable("secret key") from None


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise SignatureError(
            "signatures need the package cryptography", found="none", next_step="pip install 'mlcpipe[sign]'"
        ) from error
    return ed25519
