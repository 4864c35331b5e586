"""What tests of image trees share: a small tree, and a cache of its own for each test."""

import pytest

from tests.helpers.made_up_images import make_tree


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XKFAC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "insects")
