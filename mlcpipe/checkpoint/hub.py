"""`hf://org/name[@revision][:TAG]`: a checkpoint from a Hugging Face hub, stored in huggingface_hub's cache.

Cache layout (huggingface_hub documentation, "Manage the cache"): `models--org--name/` holds `blobs/<hash>`,
`snapshots/<commit>/<file>` linking to blobs, and `refs/<revision>` with the commit. transformers shares it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlcpipe.bundle.cached import record_use
from mlcpipe.checkpoint.checkpoint import (
    CONFIG,
    EMBEDDING_FILES,
    GENERATION_CONFIG,
    INDEX,
    PICKLES,
    PROCESSOR_CONFIGS,
    SINGLE_FILE,
    TEMPLATES,
    TOKENIZER_FILES,
    Checkpoint,
)
from mlcpipe.checkpoint.content_hash import file_digest
from mlcpipe.checkpoint.gguf.choice import TAG, gguf_models, mmproj_of
from mlcpipe.checkpoint.ollama import resolve_ollama
from mlcpipe.checkpoint.open import read_weight_map
from mlcpipe.checkpoint.preview import Download, config_preview, gguf_preview
from mlcpipe.checkpoint.transfer import RemoteFile, fetch_file, read_answer
from mlcpipe.errors import CheckpointError, DownloadError, ResourceError, naming
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.disk import FULL_DISK, check_disk_space
from mlcpipe.support.env import env, expanded
from mlcpipe.support.files import HUB_PART, HUB_SCHEME, OLLAMA_SCHEME, local_path, read_bounded
from mlcpipe.support.json_files import parse_json_object, shown, shown_path
from mlcpipe.support.progress import Progress

SPEC = re.compile(
    rf"hf://({HUB_PART}/{HUB_PART})(?:@([A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*))?(?::({TAG}))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
Check = Callable[[Checkpoint, Download], None]
MAX_PART = 96
MAX_GIT_BYTES = 1 << 30  # of a file that is stored in git itself
MAX_LISTING_BYTES, MAX_LISTING_S = 32 << 20, 60  # 100,000 files


@dataclass(frozen=True)
class HubModel:
    """A model on a hub: `repo` is `org/name`, `revision` a branch, tag or commit.

    `tag` names one of several GGUF files, such as Q4_K_M; empty is a checkpoint of safetensors.
    """

    repo: str
    revision: str
    tag: str = ""

    def __str__(self) -> str:
        return f"{HUB_SCHEME}{self.repo}@{self.revision}" + (f":{self.tag}" if self.tag else "")


def parse_spec(spec: str) -> HubModel:
    """Parses `hf://org/name[@revision][:TAG]`. Raises DownloadError for anything else."""
    match = SPEC.fullmatch(spec)
    revision = (match[2] or "main") if match else ""
    if match is None or max(map(len, match[1].split("/"))) > MAX_PART or len(revision) > 255 or ".." in revision:
        raise DownloadError(
            "bad model name",
            found=shown(spec),
            expected="hf://org/name, hf://org/name@revision or hf://org/name:TAG",
            next_step="copy org/name from the model's page",
        )
    return HubModel(match[1], revision, match[3] or "")


def resolve(
    spec: str | Path, progress: Progress, *, check: Check | None = None, weights: bool = True,
    cache_dir: Path | None = None, endpoint: str | None = None,
) -> Path:  # fmt: skip
    """The checkpoint for `spec`: a path unchanged, Ollama's file, or an `hf://` model, downloaded if needed.

    Downloads configurations, tokenizer files, the chat template, and safetensors with their index; or with a tag only
    the GGUF file that it names, with its parts and the tower beside it, if it sees; never code or pickles. An
    interrupted download resumes, even in a later call. Every file is checked against the hash that the hub lists, also
    those that another program put into the cache. When the hub is unreachable, a complete copy in the cache is used.
    `check` is called with what is known of a model before its weights are downloaded, and may refuse it. Without
    `weights` nothing is downloaded after that.
    `cache_dir` and `endpoint` default to huggingface_hub's (HF_HOME, HF_ENDPOINT).

    Raises DownloadError (missing package, hub or model, damaged content), ResourceError (disk full) and
    CheckpointError (invalid index).
    """
    path = local_path(spec)
    if path is not None:
        return path
    if str(spec).startswith(OLLAMA_SCHEME):
        return resolve_ollama(str(spec))
    model = parse_spec(str(spec))
    try:
        from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE
    except ImportError as error:
        raise DownloadError(
            f"cannot download {model}",
            expected="the package huggingface_hub",
            found="none",
            next_step="pip install 'mlcpipe[hub]'",
        ) from error
    cache = expanded(cache_dir or HF_HUB_CACHE)
    repo = repo_folder(cache, model.repo)
    with _translated(model, cache):
        try:
            listing = _listing(model, endpoint or ENDPOINT)
        except _unreachable() as error:
            copy = _complete_copy(repo, model)
            if copy is None:
                raise DownloadError(
                    f"cannot reach the hub for {model}",
                    found=error or type(error).__name__,
                    expected="a connection, or a complete copy in the cache",
                    next_step="check the network, or give a local folder",
                ) from error
            progress.stage(f"cannot reach the hub, using the cached copy of {model}")
            return copy
        path = _Snapshot(model, listing, cache, repo, endpoint).download(progress, check, weights)
    if cache_dir is None and weights:
        record_use(env().cache, str(model).replace("@main", "", 1), "")
    return path


def repo_folder(cache: Path, repo: str) -> Path:
    """The folder of `org/name` in a hub's cache."""
    return cache / f"models--{repo.replace('/', '--')}"


def _listing(model: HubModel, endpoint: str) -> dict[str, Any]:
    """The hub's description of a revision: its commit and files. Raises DownloadError for a malformed answer."""
    url = f"{endpoint}/api/models/{model.repo}/revision/{quote(model.revision, safe='')}?blobs=true"
    content = read_answer(url, MAX_LISTING_BYTES, MAX_LISTING_S)
    if content is None:
        raise _invalid_response(model, f"more than {MAX_LISTING_BYTES} bytes")
    try:
        return parse_json_object(content, where=url, error=DownloadError)
    except DownloadError as error:
        raise _invalid_response(model, error.what) from error


class _Snapshot:
    """One commit of a model: the hub's file list and its folder in the cache."""

    def __init__(
        self, model: HubModel, listing: dict[str, Any], cache: Path, repo_folder: Path, endpoint: str | None
    ) -> None:
        self._model = model
        self._cache = cache
        self._repo_folder = repo_folder
        self._endpoint = endpoint
        commit, siblings = listing.get("sha"), listing.get("siblings") or []
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise _invalid_response(model, f"commit {shown(commit)}")
        self._commit = commit
        self._listed: dict[str, dict[str, Any]] = {}
        for sibling in siblings if isinstance(siblings, list) else [siblings]:
            if not isinstance(sibling, dict) or not isinstance(sibling.get("rfilename"), str):
                raise _invalid_response(model, f"file {shown(sibling)}")
            self._listed[sibling["rfilename"]] = sibling

    def download(self, progress: Progress, check: Check | None, weights: bool) -> Path:
        """Fetches what is missing, small files first, and returns the snapshot's folder, or its GGUF file."""
        if self._model.tag:
            files = self._gguf_files()
            tower = mmproj_of(self._listed, files[0])
            beside = [] if tower is None else [tower]
            if check is not None and (missing := self._missing([*files, *beside])):
                progress.stage(f"check the header of {self._model}")
                pieces = [self._remote(name) for name in files]
                with gguf_preview(pieces, self._model, self._remote(tower) if tower else None) as preview:
                    if preview.pictures is None and beside:
                        beside, missing = [], self._missing(files)  # of another model, or not supported
                    self._check(check, preview, missing)
                if not weights:
                    return self._folder / files[0]
            path = self._fetch([*files, *beside], "download weights", progress) / files[0]
            self._remember_revision()
            return path
        if SINGLE_FILE not in self._listed and INDEX not in self._listed:
            raise self._no_weights()
        templates = filter(re.compile(rf"{TEMPLATES}/[\w-][\w.-]*\.jinja", re.ASCII).fullmatch, self._listed)
        small = [CONFIG, GENERATION_CONFIG, *PROCESSOR_CONFIGS, *TOKENIZER_FILES, *templates, *EMBEDDING_FILES]
        if SINGLE_FILE not in self._listed:
            small.append(INDEX)
        folder = self._fetch(
            [name for name in small if name in self._listed or name == CONFIG], "download tokenizer", progress
        )
        shards = [SINGLE_FILE] if SINGLE_FILE in self._listed else sorted(set(read_weight_map(folder / INDEX).values()))
        if check is not None and (missing := self._missing(shards)):
            self._check(check, config_preview(folder), missing)
            if not weights:
                return folder
        self._fetch(shards, "download weights", progress)
        self._remember_revision()
        return folder

    def _check(self, check: Check, preview: Checkpoint, missing: Sequence[RemoteFile]) -> None:
        """Let `check` judge a model whose files are `missing`; its errors name the model, not the cache."""
        with naming(self._model, preview.path, preview.folder):
            check(preview, Download(self._blobs, self._missing_bytes(missing)))

    def _remember_revision(self) -> None:
        """Store the commit of a branch or tag, for when the hub is unreachable."""
        if self._model.revision != self._commit:
            reference = self._repo_folder / "refs" / self._model.revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(reference, self._commit.encode())

    def _gguf_files(self) -> list[str]:
        """The file that the tag names, or all its parts."""
        models = gguf_models(self._listed, self._model.tag)
        if len(models) != 1:
            others = models or gguf_models(self._listed)
            raise DownloadError(
                f"{self._model} is {'several models' if models else 'no model of this folder'}",
                expected="the tag of one GGUF file",
                found=", ".join(shown(files[0]) for files in others[:8]) or "no GGUF files",
                next_step="give a longer tag" if models else "give a tag that one of the names has",
            )
        return models[0]

    @property
    def _folder(self) -> Path:
        return self._repo_folder / "snapshots" / self._commit

    @property
    def _blobs(self) -> Path:
        return self._repo_folder / "blobs"

    def _missing(self, names: Sequence[str]) -> list[RemoteFile]:
        return [remote for remote in map(self._remote, names) if not _present(self._folder / remote.name, remote)]

    def _missing_bytes(self, missing: Sequence[RemoteFile]) -> int:
        return sum(remote.size - _present_bytes(self._blobs, remote) for remote in missing)

    def _fetch(self, names: Sequence[str], stage: str, progress: Progress) -> Path:
        folder, blobs, missing = self._folder, self._blobs, self._missing(names)
        if missing:
            progress.stage(f"{stage} of {self._model}")
            progress.bytes_total(sum(remote.size for remote in missing))
            blobs.mkdir(parents=True, exist_ok=True)
            check_disk_space(blobs, self._missing_bytes(missing))
            for remote in missing:
                blob = blobs / remote.digest
                if _present(blob, remote):
                    progress.advance(remote.size)
                else:
                    fetch_file(remote, blob, progress)
                _link(blob, folder / remote.name)
        return folder

    def _remote(self, name: str) -> RemoteFile:
        import huggingface_hub

        sibling = self._listed.get(name)
        if sibling is None:
            raise DownloadError(
                f"{self._model} lacks {shown(name)}",
                expected="a checkpoint in the layout of transformers",
                found=f"{len(self._listed)} other files",
                next_step="choose another model or revision",
            )
        lfs = sibling.get("lfs")
        if lfs and not isinstance(lfs, dict):
            raise _invalid_response(self._model, f"{shown(lfs)} of {shown(name)}")
        size, digest = (lfs.get("size"), lfs.get("sha256")) if lfs else (sibling.get("size"), sibling.get("blobId"))
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise _invalid_response(self._model, f"size {shown(size)} and hash {shown(digest)} of {shown(name)}")
        url = huggingface_hub.hf_hub_url(self._model.repo, name, revision=self._commit, endpoint=self._endpoint)
        return RemoteFile(name, url, size, digest)

    def _no_weights(self) -> DownloadError:
        if models := gguf_models(self._listed):
            return DownloadError(
                f"{self._model} has GGUF files and no safetensors",
                expected="the tag of one of them",
                found=", ".join(shown(files[0]) for files in models[:8]),
                next_step=f"add the tag: {HUB_SCHEME}{self._model.repo}:Q4_K_M",
            )
        pickles = sorted(name for name in self._listed if name.endswith(PICKLES))
        return DownloadError(
            f"{self._model} has no safetensors",
            expected=f"{SINGLE_FILE} or {INDEX}",
            found=f"pickled weights ({shown(pickles[0])}), which can run arbitrary code" if pickles else "neither",
            next_step="choose a model or revision with safetensors",
        )


def _present(path: Path, remote: RemoteFile) -> bool:
    """Whether the cache has a file. Other programs write there too: one that the hub does not list is a DownloadError.

    A digest that `Checkpoint.content_hash` needs is remembered for it.
    """
    if not path.exists():
        return False
    if len(remote.digest) == len(hashlib.sha256().hexdigest()):
        found = file_digest(path, env().cached("hashes"))
    else:
        content = read_bounded(path, MAX_GIT_BYTES, DownloadError)
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if found != remote.digest:
        raise DownloadError(
            f"the cache's {shown(remote.name)} is not the hub's", where=shown_path(path), expected=remote.digest,
            found=found, next_step="delete it and run the command again",
        )  # fmt: skip
    return True


def _link(blob: Path, path: Path) -> None:
    """Make `path` a link to a blob as huggingface_hub does, or a copy where the system allows no links."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a link to nothing
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:
        partial = path.with_name(f".{path.name}.partial")
        shutil.copyfile(blob, partial)
        partial.replace(path)


def _present_bytes(blobs: Path, remote: RemoteFile) -> int:
    for path in (blobs / remote.digest, blobs / f"{remote.digest}.mlcpipe-partial"):
        if path.exists():
            return min(path.stat().st_size, remote.size)
    return 0


def _complete_copy(repo_folder: Path, model: HubModel) -> Path | None:
    """The snapshot folder of `model` in the cache, or its GGUF file, if configuration and weights are complete."""
    commit = model.revision
    if not COMMIT.fullmatch(commit):
        try:
            commit = (repo_folder / "refs" / model.revision).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
    folder = repo_folder / "snapshots" / commit
    if model.tag and COMMIT.fullmatch(commit):
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.exists()]
        models = gguf_models(names, model.tag)
        return folder / models[0][0] if len(models) == 1 and set(models[0]) <= set(names) else None
    if not COMMIT.fullmatch(commit) or not (folder / CONFIG).exists():
        return None
    if (folder / SINGLE_FILE).exists():
        return folder
    try:
        shards = set(read_weight_map(folder / INDEX).values())
    except CheckpointError:
        return None
    return folder if all((folder / shard).exists() for shard in shards) else None


def _unreachable() -> tuple[type[BaseException], ...]:
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    return (OfflineModeIsEnabled, httpx2.TransportError)


def _invalid_response(model: HubModel, found: str) -> DownloadError:
    return DownloadError(
        f"invalid response from the hub for {model}",
        expected="a commit, and a size and hash for every file",
        found=found,
        next_step="check HF_ENDPOINT",
    )


@contextmanager
def _translated(model: HubModel, cache: Path) -> Iterator[None]:
    """Turns errors of huggingface_hub and the disk into one line."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{model} is gated",
            found="no access",
            next_step="accept the terms on the model's page, then run `hf auth login`",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"the hub has no model {model.repo}",
            found="no model with this name, or a private one",
            next_step="check the name; for a private model run `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(
            f"{model.repo} has no revision {shown(model.revision)}",
            next_step="check the branch, tag or commit",
        ) from error
    except (errors.HfHubHTTPError, errors.EntryNotFoundError, httpx2.HTTPError, ValueError) as error:
        raise DownloadError(
            f"cannot download {model}", found=str(error)[:300], next_step="run the command again later"
        ) from error
    except OSError as error:
        if error.errno in FULL_DISK:
            raise ResourceError(
                f"the disk is full while downloading {model}",
                where=cache,
                found=error.strerror,
                next_step="free space and run the command again to resume",
            ) from error
        raise DownloadError(
            f"cannot store {model}", where=cache, found=error, next_step="check the folder's permissions"
        ) from error
