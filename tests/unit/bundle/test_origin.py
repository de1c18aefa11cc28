"""Whose bundle it is: signatures in minisign's format, trusted keys, bundles of one's own, and what is said of others."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe import cli
from mlcpipe.bundle.minisign import SecretKey, Signature, parse_public_key
from mlcpipe.bundle.origin import SIGNATURE, accept, origin_of, publishers
from mlcpipe.errors import BundleError, ForeignBundleWarning, SignatureError
from tests.conftest import QUICK, Bundles

pytest.importorskip("cryptography")

# Of minisign 0.11: -G -W; -G with the password "word" and the memory of -G's default; -S of b"hi\n" by the first.
PUBLIC = "RWTrzb9A4ORDyp5yWUZBf7CeGYfhO4BmNYzbfem2GTbFCW33SQCcE18w"
SECRET = b"""untrusted comment: minisign encrypted secret key
RWQAAEIyAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA682/QODkQ8qh2l0Bpf5UqpUwKq9DlFsr82BfgWheuPFPxwgnvZpZgZ5yWUZBf7CeGYfhO4BmNYzbfem2GTbFCW33SQCcE18wAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=
"""
NAME = Path(QUICK).stem  # of the small bundles' target
SIGNED = b"""untrusted comment: signature from minisign secret key
RUTrzb9A4ORDytG/5qM1TbuATAEd8W/Fx/Xlh39W06uFaCQyBN06HiLs6D7toGEFyitu3j/gDVNJVVkHuEBPyK9BV5EV0IZDsAs=
trusted comment: timestamp:1795337595\tfile:f\thashed
CzMsUDVi+E6JALiB4aHlEDv8iSK1kaf39G0VTRmeSA3YXpr49tV0TWcc1zmqEFpKVduD5J4/Vydz3mARLNN4Dg==
"""


@pytest.fixture
def foreign(tiny_bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle that somebody else compiled, and a user who knows nobody."""
    theirs = tiny_bundles["q0f32"]
    monkeypatch.setenv("MLCPIPE_CONFIG", str(tmp_path / "config"))
    return Path(shutil.copytree(theirs, tmp_path / "bundle"))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "author.key"
    assert cli.main(["sign", "--new-key", "--key", str(path)]) == 0
    return path


def loads_in_silence(bundle: Path) -> bool:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mlcpipe.Engine(bundle)
    return not seen


def test_a_bundle_from_elsewhere_says_what_it_runs(foreign: Path) -> None:
    with pytest.warns(ForeignBundleWarning) as seen:
        mlcpipe.load(foreign)
    (line,) = [str(warning.message) for warning in seen]
    assert f"runs the native code of {foreign}, for '{NAME}' on " in line and ", not signed; `mlcpipe trust" in line
    with warnings.catch_warnings(), pytest.raises(ForeignBundleWarning):
        warnings.simplefilter("error", ForeignBundleWarning)
        mlcpipe.load(foreign)  # a gate for programs: the library is not loaded


def test_own_bundles_are_silent_wherever_they_are_copied(tiny_bundles: Bundles, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_bundles["q0f32"], tmp_path / "copy"))
    assert loads_in_silence(copy)
    text = (copy / "mlcpipe.json").read_text()
    (copy / "mlcpipe.json").write_text(text.replace('"created": "20', '"created": "19'))
    assert not loads_in_silence(copy)


def test_a_bundle_can_be_accepted(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not loads_in_silence(foreign)
    assert cli.main(["trust", str(foreign)]) == 0
    assert loads_in_silence(foreign)
    assert (
        cli.main(["inspect", str(foreign)]) == 0 and "not signed, compiled or accepted here" in capsys.readouterr().out
    )
    assert cli.main(["trust", str(foreign), "--remove"]) == 0
    assert not loads_in_silence(foreign)


def test_a_trusted_signature_is_accepted_without_a_word(
    foreign: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sign", str(foreign), "--key", str(key)]) == 0
    number = parse_public_key(key.with_suffix(".key.pub").read_bytes()).identity
    with pytest.warns(ForeignBundleWarning, match=f"claims the unknown key {number} \\(not checked\\);"):
        mlcpipe.Engine(foreign)
    assert cli.main(["trust", f"{key}.pub", "--name", "Example"]) == 0
    assert loads_in_silence(foreign) and str(origin_of(foreign)) == f"signed by Example ({number})"
    capsys.readouterr()
    assert cli.main(["trust"]) == 0 and f"Example  {number}" in capsys.readouterr().out
    assert cli.main(["trust", f"{key}.pub", "--remove"]) == 0 and publishers() == {}
    assert not loads_in_silence(foreign)


@pytest.mark.parametrize("change", ["manifest", "signature", "comment", "library", "cut", "empty"])
def test_a_bad_signature_is_refused_always(foreign: Path, key: Path, change: str) -> None:
    cli.main(["sign", str(foreign), "--key", str(key)])
    cli.main(["trust", f"{key}.pub"])
    path = foreign / SIGNATURE
    lines = path.read_text().splitlines()
    if change == "manifest":
        (foreign / "mlcpipe.json").write_text((foreign / "mlcpipe.json").read_text() + " ")
    elif change == "library":  # with its new hash in the manifest
        library = next((foreign / "lib").iterdir())
        library.write_bytes(library.read_bytes() + b"x")
        from mlcpipe.bundle.integrity import file_info

        manifest = json.loads((foreign / "mlcpipe.json").read_text())
        manifest["files"][f"lib/{library.name}"] = file_info(library).model_dump()
        (foreign / "mlcpipe.json").write_text(json.dumps(manifest))
    elif change == "signature":
        raw = bytearray(base64.b64decode(lines[1]))
        raw[-1] ^= 1
        lines[1] = base64.b64encode(raw).decode()
    elif change == "comment":
        lines[2] += "!"
    if change in ("signature", "comment"):
        path.write_text("\n".join(lines) + "\n")
    elif change == "cut":
        path.write_text("\n".join(lines[:3]))
    elif change == "empty":
        path.write_text("")
    words = "cannot be read" if change in ("cut", "empty") else "does not hold"
    accept(foreign)  # also of a bundle that was compiled here
    for use in (mlcpipe.Engine, mlcpipe.load, origin_of):
        with pytest.raises(SignatureError, match=f"the signature {words} in .*{SIGNATURE}.*do not use this bundle"):
            use(foreign)
    assert cli.main(["inspect", str(foreign)]) == cli.main(["trust", str(foreign)]) == 2


@pytest.mark.parametrize("app", ["android", "cli", "ios", "native", "weights"])
def test_a_bad_signature_is_not_packaged(
    app: str, foreign: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal comes before all others: this bundle is for none of them but the weights."""
    cli.main(["sign", str(foreign), "--key", str(key)])
    cli.main(["trust", f"{key}.pub"])
    (foreign / "mlcpipe.json").write_text((foreign / "mlcpipe.json").read_text() + " ")
    capsys.readouterr()
    assert cli.main(["package", str(foreign), "--app", app, "-o", str(tmp_path / "out")]) == 2
    assert "the signature does not hold" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_packaging_a_bundle_says_whose_it_is(foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, as loading does; the command in it is safe to paste."""
    bundle = foreign.rename(tmp_path / "of; id")
    for trusted in (False, True):
        words = ["package", str(bundle), "--app", "weights", "-o", str(tmp_path / f"{trusted}.mlcp")]
        with warnings.catch_warnings():
            warnings.simplefilter("default", ForeignBundleWarning)
            assert cli.main(words) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
        assert len(notes) == (not trusted)
        for line in notes:
            assert f"this packages the native code of {bundle}, for '{NAME}' on " in line
            assert f", not signed; `mlcpipe trust '{bundle}'` accepts it" in line
        assert cli.main(["trust", str(bundle)]) == 0


def test_an_unlisted_file_is_not_read(foreign: Path) -> None:
    """The signature covers the manifest, the manifest all that is executed or parsed."""
    (foreign / "README.md").write_text("what people put there")
    for name in ("chat_template.jinja", "generation_config.json"):
        (foreign / name).write_text("{}")
        with pytest.raises(BundleError, match=f"the manifest lacks the bundle's {name}"):
            mlcpipe.Engine(foreign)
        (foreign / name).unlink()
    (foreign / "additional_chat_templates").mkdir()
    with pytest.raises(BundleError, match="the manifest lacks the bundle's additional_chat_templates"):
        mlcpipe.Engine(foreign)
    (foreign / "additional_chat_templates").rmdir()
    assert mlcpipe.Engine(foreign).on_host


def test_what_minisign_made_is_read() -> None:
    public = parse_public_key(PUBLIC.encode())
    Signature.parse(SIGNED).check(b"hi\n", public)
    with pytest.raises(SignatureError, match="does not hold"):
        Signature.parse(SIGNED).check(b"ho\n", public)
    secret = SecretKey.parse(SECRET, lambda: "not asked for")
    assert secret.public == public and public.identity == "CA43E4E040BFCDEB" and public.text == PUBLIC
    Signature.parse(secret.sign(b"x", "f").encode()).check(b"x", public)
    again = SecretKey.parse(secret.file_text.encode(), lambda: "not asked for")
    assert again == secret


@pytest.mark.parametrize("text", [b"", b"\xff", b"RWQ", PUBLIC.encode()[:-4], b"a\nb\nc\nd", SIGNED])
def test_what_is_no_key_is_refused_in_one_line(text: bytes) -> None:
    for parse in (parse_public_key, lambda raw: SecretKey.parse(raw, str)):
        with pytest.raises(SignatureError, match="key cannot be read"):
            parse(text)


@pytest.mark.full  # scrypt takes 1 GiB and seconds
@pytest.mark.skipif(shutil.which("minisign") is None, reason="minisign is not installed")
def test_minisign_agrees(foreign: Path, key: Path, tmp_path: Path) -> None:
    cli.main(["sign", str(foreign), "--key", str(key)])
    check = ["minisign", "-V", "-p", f"{key}.pub", "-m", str(foreign / "mlcpipe.json")]
    assert subprocess.run(check, capture_output=True, text=True).returncode == 0
    theirs = tmp_path / "theirs"
    make = ["minisign", "-G", "-p", f"{theirs}.pub", "-s", str(theirs)]
    subprocess.run(make, input="word\nword\n", text=True, check=True, capture_output=True)
    secret = SecretKey.parse(theirs.read_bytes(), lambda: "word")  # scrypt with 1 GiB, as minisign asks for
    assert secret.public == parse_public_key(Path(f"{theirs}.pub").read_bytes())
    with pytest.raises(SignatureError, match="wrong password"):
        SecretKey.parse(theirs.read_bytes(), lambda: "words")


def test_keys_that_others_may_write_are_not_trusted(foreign: Path, key: Path, tmp_path: Path) -> None:
    cli.main(["trust", f"{key}.pub"])
    assert oct((tmp_path / "config").stat().st_mode & 0o777) == "0o700" and key.stat().st_mode & 0o077 == 0
    for folder in (tmp_path / "config", tmp_path / "config" / "publishers"):
        folder.chmod(0o777)
    with pytest.raises(SignatureError, match="others may have written"):
        publishers()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sign", "--key", "no.key"], "nothing to sign"),
        (["sign", "{bundle}", "--key", "no.key"], "missing secret key"),
        (["sign", "{bundle}", "--key", "{key}.pub"], "the secret key cannot be read"),
        (["sign", "--new-key", "--key", "{key}"], "there is a key already"),
        (["trust", "no.pub"], "no key and no bundle; expected the path of a key or bundle, or the 56 characters of a "
                              "key; found no.pub; check the path"),
        (["trust", "\udcff"], "no key and no bundle"),
        (["trust", "A" * 56], "the public key cannot be read"),
        (["trust", "{key}.pub", "--name", "../x"], "--name"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    foreign: Path, key: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([part.format(bundle=foreign, key=key) for part in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
