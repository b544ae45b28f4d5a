"""From a name to a folder, with every way it can fail and what the user is told."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from herald.errors import ModelNotFound
from herald.models import resolve, resolve_model
from tests.support.golden import GOLDEN

REPO = "someone/some-model"


def test_a_folder_is_itself() -> None:
    assert resolve_model(str(GOLDEN / "sdar_b4")) == GOLDEN / "sdar_b4"
    assert resolve_model(GOLDEN / "sdar_b4") == GOLDEN / "sdar_b4"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(GOLDEN / "sdar_b4", tmp_path / "model")
    assert resolve_model("~/model") == tmp_path / "model"


def test_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "BUNDLED_FOLDER", GOLDEN / "sdar_b4")
    assert resolve_model("tiny") == GOLDEN / "sdar_b4"
    monkeypatch.setattr(resolve, "BUNDLED_FOLDER", tmp_path)
    with pytest.raises(ModelNotFound, match="bundled model 'tiny' is not in this installation"):
        resolve_model("tiny")


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("name", ["~no-such-user-x/y", "x" * 5000, "a\0b"])
def test_what_cannot_be_a_path_is_one_short_line(name: str) -> None:
    with pytest.raises(ModelNotFound, match="there is no model") as caught:
        resolve_model(name)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_a_file_is_not_a_model() -> None:
    with pytest.raises(ModelNotFound, match="is a file") as caught:
        resolve_model(GOLDEN / "sdar_b4" / "config.json")
    assert str(GOLDEN / "sdar_b4") in caught.value.remedy


@pytest.mark.parametrize("name", ["tinny", "/no/such/folder", "./missing", "a/b/c", "no spaces/allowed", ""])
def test_unknown_names_say_what_can_be_passed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    assert "folder" in str(caught.value)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bool]]:
    """Puts a hub in place: what its cache and its network answer, each a path or an error."""

    def install(cache: Path | Exception, network: Path | Exception) -> list[bool]:
        asked: list[bool] = []

        def snapshot_download(
            repo_id: str, allow_patterns: list[str], local_files_only: bool = False, **_: Any
        ) -> str:
            assert repo_id == REPO and "*.safetensors" in allow_patterns
            assert not any(pattern.endswith((".py", ".bin")) for pattern in allow_patterns)
            asked.append(local_files_only)
            answer = cache if local_files_only else network
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return asked

    return install


NOT_CACHED = LocalEntryNotFoundError("not cached")


def test_complete_snapshot_needs_no_network(hub: Callable[..., list[bool]]) -> None:
    asked = hub(GOLDEN / "sdar_b4", AssertionError("the network was asked"))
    assert resolve_model(REPO) == GOLDEN / "sdar_b4"
    assert asked == [True]


def test_download_when_not_cached(hub: Callable[..., list[bool]]) -> None:
    asked = hub(NOT_CACHED, GOLDEN / "sdar_b8")
    assert resolve_model(REPO) == GOLDEN / "sdar_b8"
    assert asked == [True, False]


@pytest.mark.parametrize("left", ["config.json", "model.safetensors"])
def test_incomplete_snapshot_is_completed(hub: Callable[..., list[bool]], tmp_path: Path, left: str) -> None:
    shutil.copy(GOLDEN / "sdar_b4" / left, tmp_path)
    asked = hub(tmp_path, GOLDEN / "sdar_b4")
    assert resolve_model(REPO) == GOLDEN / "sdar_b4"
    assert asked == [True, False]


def test_no_network_says_what_to_do(hub: Callable[..., list[bool]]) -> None:
    hub(NOT_CACHED, OSError("connection refused\nby the other side"))
    with pytest.raises(ModelNotFound, match=r"connection refused\)") as caught:
        resolve_model(REPO)
    assert "HF_HUB_OFFLINE" in caught.value.remedy and f"hf download {REPO}" in caught.value.remedy


def test_offline_with_the_real_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client in its offline mode, with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelNotFound, match="not in the local hub cache"):
        resolve_model(REPO)


def test_name_that_the_hub_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"some\.\.one/model"):
        resolve_model("some..one/model")
