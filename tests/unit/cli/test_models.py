"""``herald models`` says what the registry says, and the registry says what the tests show."""

from __future__ import annotations

import json

import pytest

from herald.cli.main import main
from herald.models import PRESETS
from herald.models.registry import CHECKS, FAMILIES, find_family
from herald.models.resolve import HUB_ID
from tests.support.golden import GOLDEN


def test_every_family_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in report["families"]] == [family.name for family in FAMILIES]
    for found, family in zip(report["families"], FAMILIES, strict=True):
        assert found["hub_ids"] == list(family.hub_ids)
        assert found["presets"].keys() == {n for n, c in PRESETS.items() if c.family == family.name}
        assert all(counts["parameters"] >= counts["active"] > 10**8 for counts in found["presets"].values())


@pytest.mark.parametrize("columns", [80, 200])  # a pipe has 80
def test_the_table_shows_checkpoints_and_checks(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["models"]) == 0
    words = capsys.readouterr().out.split()
    for family in FAMILIES:
        assert {*family.title.split(), *family.hub_ids, *family.architectures} <= set(words)
    assert all(" ".join(meaning.split()) in " ".join(words) for meaning in CHECKS.values())


def test_records_are_filled() -> None:
    for family in FAMILIES:
        assert family.title and family.paper and family.hub_ids, family.name
        assert all(HUB_ID.fullmatch(name) for name in family.hub_ids)
        assert any(config.family == family.name for config in PRESETS.values()), family.name
        assert set(family.verified) <= CHECKS.keys()
        assert family.golden or not {"logits", "tokens"}.intersection(family.verified)
    assert len({family.title for family in FAMILIES}) == len(FAMILIES)


def test_expected_results_belong_to_their_family() -> None:
    named = {folder: family for family in FAMILIES for folder in family.golden}
    folders = {path.parent.name for path in GOLDEN.glob("*/config.json")}
    assert named.keys() == folders
    for folder, family in named.items():
        architectures = json.loads((GOLDEN / folder / "config.json").read_text())["architectures"]
        assert find_family(architectures) == family
