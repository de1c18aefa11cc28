"""`mlcpipe sign` and `mlcpipe trust`: bundles that load without a notice."""

from __future__ import annotations

import getpass
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.options import bundle_folder
from mlcpipe.cli.terminal import print_rows, say, stdout_console
from mlcpipe.errors import SignatureError, UsageError
from mlcpipe.loading import is_bundle
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.files import local_path, read_bounded
from mlcpipe.support.private import private_folder

if TYPE_CHECKING:
    from rich.console import Console

_KEY_LINE = re.compile(r"[A-Za-z0-9+/]{50,}=*")  # base64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")


def sign_command(
    key: Annotated[Path, typer.Option("--key", "-k", help="The file of the secret key.")],
    bundle: Annotated[
        Path | None, typer.Argument(help="A compiled model's folder.", parser=bundle_folder, metavar="bundle")
    ] = None,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Make the key first, without a password, and KEY.pub beside it.")
    ] = False,
) -> None:
    """Sign a bundle: people who trust your key load it without a notice that it is a program.

    It writes `mlcpipe.json.minisig` into the bundle: an Ed25519 signature of the manifest, which has the hashes of all
    files, in the format of minisign. A key of `minisign -G`, with a password or without, will do.

    Examples:

    `mlcpipe sign --new-key --key ~/publisher.key`

    `mlcpipe sign ./my-bundle --key ~/publisher.key`

    `minisign -V -p publisher.key.pub -m my-bundle/mlcpipe.json`
    """
    from mlcpipe.bundle import MANIFEST, read_manifest, verify
    from mlcpipe.bundle.minisign import MAX_BYTES, SecretKey
    from mlcpipe.bundle.origin import SIGNATURE

    console = stdout_console()
    if new_key:
        _write_keys(key, console)
    elif bundle is None:
        raise UsageError("nothing to sign", next_step="give a bundle, or --new-key")
    if bundle is None:
        return
    verify(bundle, read_manifest(bundle, check_abi=False), deep=True)
    text = read_bounded(key, MAX_BYTES, SignatureError, "secret key", "make one with --new-key")
    secret = SecretKey.parse(text, lambda: getpass.getpass(f"Password of {key}: "))
    atomic_write(bundle / SIGNATURE, secret.sign((bundle / MANIFEST).read_bytes(), MANIFEST).encode())
    say(console, f"{bundle / SIGNATURE}: signed with key {secret.public.identity}")


def _write_keys(path: Path, console: Console) -> None:
    from mlcpipe.bundle.minisign import SecretKey

    public = path.with_name(f"{path.name}.pub")
    for one in (path, public):
        if one.exists():
            raise UsageError("there is a key already", where=one, next_step="give another --key")
    secret = SecretKey.make()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret.file_text)
    public.write_text(secret.public.file_text)
    say(console, f"{path}: keep it secret\n{public}: publish it; others type  mlcpipe trust {secret.public.text}")


def trust_command(
    what: Annotated[
        str | None, typer.Argument(help="A publisher's public key: its file or its text; or one bundle.")
    ] = None,
    name: Annotated[str, typer.Option(help="What to call the publisher. (default: the name of the key's file)")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Trust this key no longer.")] = False,
) -> None:
    """Trust a publisher's key: bundles signed with it load without a notice. Alone it lists the trusted keys.

    A bundle is a program: loading it runs its native code. Bundles that you compiled are known. For others `chat` says
    on stderr what it runs and whose key it names; with a bundle instead of a key, that bundle is accepted as it is.

    Examples:

    `mlcpipe trust publisher.key.pub --name Example`

    `mlcpipe trust RWTrzb9A4ORDyp5yWUZBf7CeGYfhO4BmNYzbfem2GTbFCW33SQCcE18w`

    `mlcpipe trust ./downloaded-bundle`
    """
    from mlcpipe.bundle.minisign import MAX_BYTES, parse_public_key
    from mlcpipe.bundle.origin import publishers, publishers_folder

    console = stdout_console()
    known = publishers()
    if what is None:
        print_rows(console, [(one, f"{key.identity}  {key.text}") for one, key in known.items()])
        return
    path = local_path(what)
    if path is not None and is_bundle(path):
        return _accept(path, console, remove=remove)
    is_file = path is not None and os.path.isfile(path)
    if not is_file and not _KEY_LINE.fullmatch(what):
        raise UsageError(
            "no key and no bundle", found=what, expected="the path of a key or bundle, "
            "or the 56 characters of a key", next_step="check the path" if path and not path.exists() else None,
        )  # fmt: skip
    text = read_bounded(Path(path), MAX_BYTES, SignatureError) if is_file and path else os.fsencode(what)
    key = parse_public_key(text)
    folder = publishers_folder()
    if folder is None:
        raise UsageError("there is no folder for trusted keys", next_step="set MLCPIPE_CONFIG")
    same = [one for one, other in known.items() if other.number == key.number]
    if remove:
        for one in same:
            (folder / f"{one}.pub").unlink()
        return say(console, f"{key.identity} is not trusted" + (" any more" if same else ""))
    name = name or (path.name.removesuffix(".pub") if is_file and path else key.identity)
    if not _NAME.fullmatch(name) or (name in known and known[name] != key) or set(same) - {name}:
        found = f"{same[0]}, which has this key" if set(same) - {name} else name
        raise UsageError("--name", expected="a new name of letters, digits, dots and dashes", found=found)
    atomic_write(private_folder(folder) / f"{name}.pub", key.file_text.encode())
    say(console, f"bundles that {name} ({key.identity}) signed load without a notice")


def _accept(bundle: Path, console: Console, *, remove: bool) -> None:
    from mlcpipe.bundle import read_manifest, verify
    from mlcpipe.bundle.origin import accept, forget, origin_of

    if remove:
        forget(bundle)
        return say(console, f"{bundle} is not accepted")
    verify(bundle, read_manifest(bundle, check_abi=False), deep=True)
    origin_of(bundle)  # a bad signature is refused
    if not accept(bundle):
        raise UsageError("the bundle cannot be recorded", where=bundle, next_step="set MLCPIPE_CONFIG")
    say(console, f"{bundle} loads without a notice, as it is now")
