"""README and the first page of the docs show no number that results/headline.json and its records do not have."""

import importlib.util
import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]
SETTINGS = {"0.2", "0.4", "0.8", "3.11", "64"}  # learning rates, a version of Python, a factor: chosen, not measured
MEASURED = r"(?<![\w.])(?:\d+\.\d+|\d+(?=%| ?per cent| times| points))"

spec = importlib.util.spec_from_file_location("headline", ROOT / "results" / "headline.py")
headline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(headline)


@pytest.fixture(scope="module")
def found():
    return headline.collect()


def test_the_records_give_what_headline_json_and_the_pages_say(found):
    again = "; run python results/headline.py"
    assert (ROOT / "results" / "headline.json").read_text() == headline.as_text(found[0]), "headline.json" + again
    for page in headline.PAGES:
        assert page.read_text() == headline.filled(page.read_text(), *found), page.name + again


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_measured_number_has_a_name(page):
    text = page.read_text()
    assert re.search(headline.TABLE, text)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(headline.MARK, "", re.sub(headline.TABLE, "", text))
    text = re.sub(r"\]\([^)]*\)", "]", text)  # addresses of links
    cells = [cell for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) for cell in row.split("|")[2:-1]]
    assert [cell for cell in cells if re.search(r"\d", re.sub(r"<!--.*?-->", "", cell))] == []
    assert set(re.findall(MEASURED, text)) <= SETTINGS


def test_accuracies_of_runs_are_those_of_their_events():
    """A second way, without the library: the last event of each job."""
    numbers = json.loads((ROOT / "results" / "headline.json").read_text())
    checked = 0
    for number in numbers.values():
        task, values = number["read"].get("task"), []
        for seed in number["seeds"] or [] if task and number["read"]["line"] != "ceiling" else []:
            files = [ROOT / folder / "jobs" / number["read"]["line"] / str(seed) for folder in number["record"]]
            (file,) = (folder / "events.jsonl" for folder in files if folder.is_dir())
            events = [json.loads(line) for line in file.read_text().splitlines()]
            last = [event for event in events if event["event"] == "task"][-1]
            values.append(last["accuracy"][events[0]["tasks"].index(task)])
        if values:
            checked += 1
            assert number["mean"] == pytest.approx(statistics.fmean(values), rel=1e-12)
            assert number["repeats"] == len(values)
            spread = statistics.stdev(values) if len(values) > 1 else None
            assert number["deviation"] == pytest.approx(spread, abs=1e-12)
    assert checked >= 20
