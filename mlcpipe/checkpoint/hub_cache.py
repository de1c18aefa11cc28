"""What a hub's cache holds of a model, and its removal."""

from __future__ import annotations

from pathlib import Path

from mlcpipe.checkpoint.gguf.choice import gguf_models, is_mmproj
from mlcpipe.checkpoint.hub import parse_spec, repo_folder
from mlcpipe.errors import DownloadError
from mlcpipe.support.atomic import only_writer, remove_directory
from mlcpipe.support.disk import folder_bytes
from mlcpipe.support.env import expanded

_LOCK = ".mlcpipe-lock"


def downloaded(spec: str, cache_dir: Path | None = None) -> list[Path]:
    """The folder of `hf://org/name` in the cache, with all revisions; of a tag its GGUF files, links and contents.

    Empty if there is nothing, or no package huggingface_hub, whose cache it is.
    """
    if cache_dir is None:
        try:
            from huggingface_hub.constants import HF_HUB_CACHE
        except ImportError:
            return []
        cache_dir = expanded(HF_HUB_CACHE)
    model = parse_spec(spec)
    folder = repo_folder(cache_dir, model.repo)
    if folder.is_symlink() or not folder.is_dir():
        return []
    if not model.tag:
        return [folder]
    found: set[Path] = set()
    for snapshot in sorted((folder / "snapshots").glob("*")):
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
        chosen = gguf_models(names, model.tag)
        towers = filter(is_mmproj, names) if chosen == gguf_models(names) else ()  # which other tags share
        links = [snapshot / name for files in (*chosen, towers) for name in files if name in names]
        blobs = [link.resolve() for link in links if link.is_symlink()]
        found |= {*links, *(blob for blob in blobs if blob.parent == (folder / "blobs").resolve() and blob.exists())}
    return sorted(found)


def download_bytes(paths: list[Path]) -> int:
    """Bytes of what `downloaded` found."""
    return sum(folder_bytes(path) if path.is_dir() else path.lstat().st_size for path in paths)


def remove_download(paths: list[Path]) -> None:
    """Remove what `downloaded` found. Raises DownloadError while another run downloads it, and OSError."""
    for path in paths:
        if path.is_dir():
            for lock in (path / "blobs").glob(f".*{_LOCK}"):
                busy = DownloadError(
                    "another run downloads the model", where=path, next_step="end it, then run the command again"
                )
                with only_writer(lock.with_name(lock.name.removeprefix(".").removesuffix(_LOCK)), busy):
                    pass
            remove_directory(path)
        else:
            path.unlink(missing_ok=True)
