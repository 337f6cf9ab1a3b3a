"""`sennit doctor`: says what is there, and why the rest is not."""

from __future__ import annotations

import json

import pytest

from tests.cli.program import sennit


@pytest.fixture(scope="module")
def document() -> dict:
    done = sennit("doctor", "--json", "--no-rates", MALLOC_ARENA_MAX="3")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_device_is_usable_or_says_why_not(document: dict) -> None:
    assert document["devices"].keys() == {"cpu", "cuda", "musa"}
    cpu = document["devices"]["cpu"]
    assert cpu["usable"] and cpu["backend"] == "gloo" and cpu["memory_bytes"] > 2**28
    assert all(facts["usable"] or facts["why"] for facts in document["devices"].values())


def test_every_operator_has_a_provider(document: dict) -> None:
    assert {"rms_norm", "linear_cross_entropy", "adamw_"} <= document["operators"].keys()
    for rows in document["operators"].values():
        assert any(row["usable"] for row in rows) and all(row["why"] for row in rows)


def test_start_up_settings_say_who_set_them(document: dict) -> None:
    settings = {row["name"]: row for row in document["start_up"]["settings"]}
    assert settings["OMP_NUM_THREADS"]["set_by"] == "sennit train"
    if "MALLOC_ARENA_MAX" in settings:
        assert settings["MALLOC_ARENA_MAX"] | {"reason": ""} == {
            "name": "MALLOC_ARENA_MAX",
            "value": "3",
            "set_by": "you",
            "reason": "",
        }


def test_versions_and_optional_packages(document: dict) -> None:
    assert document["versions"]["torch"] and document["sennit"]
    assert all(facts["for"] for facts in document["optional"].values())


def test_page_for_people() -> None:
    done = sennit("doctor", "--no-rates", SENNIT_DEVICE="cudda")
    assert done.returncode == 0, done.stderr
    words = ("Devices", "Operators", "Start-up settings", "Optional packages", "cpu", "There is no device 'cudda'")
    assert [word for word in words if word not in done.stdout] == []
