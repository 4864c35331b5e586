"""The page of a report: what it says, that it needs nothing but itself, and how a browser shows it."""

import importlib.util
import json
import re
import shutil
from dataclasses import asdict, replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markupsafe import escape

from tests.helpers import made_up
from xkfac.errors import XkfacError
from xkfac.experiments.records import Trial
from xkfac.experiments.report.choices import read_tuned
from xkfac.experiments.report.page import write_report
from xkfac.experiments.runs.job_folder import JobFolder
from xkfac.experiments.runs.results import pooled
from xkfac.experiments.tuning.trials import Choice, ChoiceEntry

HOSTILE = """<script>alert('x')</script> & "quoted" $\\frac{1}{2}$ ${title} %s ünï 漢字 \t\x07\n""" + "very-long-" * 30
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """The elements of a page and its text; fails where elements are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self._open = [], "", []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def written(runs, folder):
    path, _ = write_report(runs, folder)
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def hostile():
    run = made_up.single()
    lines = dict(run.recipe.lines)
    lines["xkfac"] = replace(lines["xkfac"], label=HOSTILE, note=HOSTILE)
    figures = {"../" + HOSTILE: replace(run.recipe.figures["a"], title=HOSTILE, note=HOSTILE)}
    recipe = replace(run.recipe, lines=lines, figures=figures, title=HOSTILE, description=HOSTILE)
    return replace(run, recipe=recipe, provenance={HOSTILE: HOSTILE, "list": [HOSTILE]})


@pytest.fixture
def no_figures(monkeypatch):
    """Leave the figures out, which take most of the time of a page, where its text is what is asked for."""
    monkeypatch.setattr("xkfac.experiments.report.page.draw_all", lambda *_: [])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder, the text and the elements of the page of one run."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, *written([made_up.small()], folder)


def test_the_page_says_it_all(plain):
    run, (_, text, page) = made_up.small(), plain
    assert "After 10 tasks, XK-FAC is at 92.00" in page.text
    assert re.search(r"98\.50\s±\s0\.71", page.text)
    assert "the extended curvature" in page.text
    assert "damping0.01" in page.text.replace(" ", "")
    for key, value in made_up.PROVENANCE.items():
        assert key in page.text
        assert str(value) in page.text or isinstance(value, dict)
    assert '"numpy": "2.4.6"' in page.text
    assert str(escape(run.recipe.to_toml())) in text
    assert "0 to 1" in page.text  # seeds
    assert "in progress" not in page.text
    assert text.count("<b>92.00") == 1
    assert text.count("(best)") == 4


def test_links_lead_to_files(plain):
    folder, _, page = plain
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [attributes["href"] for attributes in page.all("a")]
    assert len(links) == 4 + 1 + 3 * 4
    for link in links:
        assert link[1:] in ids if link.startswith("#") else (folder / link).is_file()


@pytest.mark.parametrize("kind", ["plain", "hostile"])
def test_the_page_needs_nothing_but_itself(kind, plain, tmp_path):
    text, page = plain[1:] if kind == "plain" else written([hostile()], tmp_path)
    assert not re.search(r"https?://|@import|//[a-z]+\.", re.sub(r"data:image/png;base64,[\w+/=]+", "", text))
    for tag, attributes in page.elements:
        assert tag not in ("script", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "srcset", "data", "action"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "figures/", "data:image/png;base64,")) or value == "data:,"
        for target in re.findall(r"url\((.*?)\)", " ".join(value or "" for value in attributes.values())):
            assert target.startswith("#")
    used = {a["href"][1:] for a in page.all("use")}
    assert used <= {a["id"] for _, a in page.elements if "id" in a}


def test_labels_are_text_whatever_they_hold(tmp_path):
    text, page = written([hostile()], tmp_path)
    assert "<script" not in text
    assert " ".join(page.text.replace("\x07", "").split()).count(" ".join(HOSTILE.replace("\x07", "").split())) >= 5
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    files = [path for path in (tmp_path / "figures").iterdir() if path.suffix == ".svg"]
    assert len(files) == 4  # none went elsewhere by its name
    for path in files:
        ElementTree.parse(path)
    assert any("&lt;script&gt;" in path.read_text(encoding="utf-8") for path in files)


def test_same_results_same_bytes(tmp_path):
    for name in ("one", "two"):
        write_report([made_up.diverged()], tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == 2 + 3 * 4
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_a_run_in_progress_says_so(tmp_path, no_figures):
    _, page = written([made_up.in_progress()], tmp_path)
    assert "in progress: 0 of 6 jobs done, 2 begun, 4 to come" in page.text
    assert "So far, after 4 tasks, XK-FAC is at 94.50%" in page.text
    assert "0 to 4 of 10 tasks so far" in page.text
    assert "not started" in page.text


def test_diverged_lines_are_named(tmp_path, no_figures):
    _, page = written([made_up.diverged()], tmp_path)
    assert "diverged at task 7 (1 of 2 repeats)" in page.text


def test_several_runs(tmp_path, no_figures):
    runs = [made_up.small("runs/one"), made_up.small("runs/two", shift=8.0)]
    text, page = written(runs, tmp_path)
    assert "two: XK-FAC" in page.text
    assert "two against one" in page.text
    assert "<b>+8.00</b>" in text
    assert "Where it comes from: one" in page.text


def test_the_largest_experiment_stays_small(tmp_path):
    text, page = written([made_up.large()], tmp_path)
    assert len(text.encode()) < 3_000_000
    assert "diverged at task 24 (4 of 4 repeats)" in page.text


def test_a_run_of_images(tmp_path, no_figures):
    text, page = written([made_up.images()], tmp_path)
    said = " ".join(page.text.split())
    assert "resnet18 at 64 pixels, from tiny to birds, cars, flowers, in 2 orders, 6 lines, 2 repeats" in said
    assert "mnist" not in said.lower()
    assert "After 4 tasks, XK-FAC, alpha is at 53.50" in said
    assert "a network of its own for each reaches 58.00" in said
    assert "hollow markers: a network of its own for each task" in said
    rows = re.findall(r'<tr[^>]*><th scope="row">(.*?)</tr>', text)
    kfac = re.sub(r"<.*?>|&nbsp;", " ", next(row for row in rows if row.startswith("K-FAC")))
    assert kfac.split() == (
        "K-FAC ✓ 45.50 ± 0.71 41.50 ± 7.78 71.50 ± 0.71 31.50 ± 6.36 47.50 ± 0.71".split()  # noqa: SIM905
    )
    assert sum("<b>54.50&nbsp;" in row for row in rows) == 1  # XK-FAC on the source, in its block
    # After all tasks K-FAC has 45 of 60 left, and 46 of 61.
    kept = f"K-FAC</th><td>{(100 * 45 / 60 + 100 * 46 / 61) / 2:.1f}&nbsp;"
    assert [row.startswith(kept) for row in rows].count(True) == 1
    assert "forward transfer" not in said
    links = [attributes["href"] for attributes in page.all("a") if not attributes["href"].startswith("#")]
    assert "figures/accuracies.csv" in links
    assert all((tmp_path / link).is_file() for link in links)
    assert 'id="choices"' not in text


def test_images_and_digits_in_one_report(tmp_path, no_figures):
    text, page = written([made_up.images(), made_up.small()], tmp_path)
    assert "images: resnet18 at 64 pixels" in page.text
    assert "made-up: digits, 3 lines" in page.text
    assert text.count('aria-label="Table of accuracies"') == 1
    (tmp_path / "figures" / "accuracies.csv").unlink()
    written([made_up.small()], tmp_path)
    assert not (tmp_path / "figures" / "accuracies.csv").exists()


def test_names_of_tasks_are_text_whatever_they_hold(tmp_path):
    run = made_up.images()
    names = {"cars": HOSTILE}
    tasks = {names.get(name, name): task for name, task in run.recipe.tasks.items()}
    lines = {
        name: replace(line, jobs=[replace(job, tasks=[names.get(n, n) for n in job.tasks]) for job in line.jobs])
        for name, line in run.lines.items()
    }
    text, _ = written([replace(run, recipe=replace(run.recipe, tasks=tasks), lines=lines)], tmp_path)
    assert "<script" not in text
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert "very-long-very-long" in text


def test_a_tuned_run_says_what_was_chosen_and_why(tmp_path):
    run = made_up.tuned(tmp_path / "run")
    text, page = written([run], tmp_path / "report")
    said = " ".join(page.text.split())
    assert said.count("best of 3, by 2.00 points; 1 diverged") == 6
    assert "41.00 (lr 0.05, damping 0.0001)" in said
    assert "no source data" in said
    assert '<a href="#choices">' in text
    assert 'id="figure-scatter"' in text
    assert "3 of 12 settings diverged" in said
    assert (tmp_path / "report" / "figures" / "scatter.png").is_file()
    row = re.search(r"<tr><th scope=\"row\">XK-FAC</th>(<td>0.*?)</tr>", text)[1]
    assert re.sub(r"<.*?>", "|", row) == (
        "|0||birds||0.1||0.0001||43.00||41.00 (lr 0.05, damping 0.0001)||best of 3, by 2.00 points; 1 diverged|"
    )


def test_pooled_tunings_show_the_choices_of_all(tmp_path, no_figures):
    others = made_up.IMAGES.replace("repeats = 2", "repeats = 2\nseed = 2")
    jobs = [made_up.image_job("xkfac", seed) for seed in (2, 3)]
    runs = [made_up.tuned(tmp_path / "a"), made_up.tuned(tmp_path / "b", *jobs, text=others, seeds=(2, 3))]
    (run,) = pooled(runs)
    found = read_tuned(run)
    assert [(row[1], row[2]) for row in found.rows] == [
        (str(seed), task) for seed in range(4) for task in ("birds", "cars", "flowers")
    ]
    assert len(found.points) == 24
    assert "12 choices" in written([run], tmp_path / "report")[1].text


def test_choices_are_told_by_the_page_as_by_the_command(tmp_path):
    best, second = Trial(0, 0.1, 1e-4, 43.0), Trial(1, 0.05, 1e-5, 41.5)
    choices = [
        Choice("birds", best, second, trials=4, lost=1),
        Choice("cars", replace(best, damping=None), replace(second, damping=None), trials=2),
        Choice("flowers", best, trials=1),
        Choice("flowers", None, trials=3, lost=3, diverged=True),
    ]
    told = [ChoiceEntry.of(JobFolder(tmp_path, "xkfac", seed), choice) for seed, choice in enumerate(choices)]
    run = made_up.tuned(tmp_path / "run")
    (tmp_path / "run" / "choices.json").write_text(json.dumps([asdict(each) for each in told]))
    assert read_tuned(run).rows == [["XK-FAC", *each.cells()[1:]] for each in told]


def test_a_tuning_that_measured_nothing_has_choices_and_no_scatter(tmp_path):
    text, _ = written([made_up.tuned(tmp_path / "run", finite=False)], tmp_path / "report")
    assert 'id="choices"' in text
    assert "figure-scatter" not in text


def test_a_tuning_without_choices_so_far_is_a_run_like_others(tmp_path, no_figures):
    run = made_up.tuned(tmp_path / "run")
    for name in ("choices.json", "points.json"):
        (tmp_path / "run" / name).unlink()
    assert read_tuned(run) is None
    assert 'id="choices"' not in written([run], tmp_path / "report")[0]


def test_damaged_choices_are_named(tmp_path):
    run = made_up.tuned(tmp_path / "run")
    for content in ("{", "{}"):
        (tmp_path / "run" / "choices.json").write_text(content)
        with pytest.raises(XkfacError, match=r"choices.json' cannot be read .*; 'xkfac resume .*run' writes it anew"):
            read_tuned(run)


def test_nothing_to_report_on(tmp_path):
    with pytest.raises(XkfacError, match=r"nothing to report on yet \('nothing'\)"):
        write_report([made_up.nothing()], tmp_path)
    with pytest.raises(XkfacError, match="no run at all"):
        write_report([], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(XkfacError, match="could not be written"):
        write_report([made_up.single()], tmp_path / "file")


def test_a_report_that_fails_leaves_the_old_one(tmp_path, monkeypatch, no_figures):
    path, _ = write_report([made_up.single()], tmp_path)
    old = path.read_bytes()
    monkeypatch.setattr("xkfac.experiments.report.page._settings", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report([made_up.small()], tmp_path)
    assert path.read_bytes() == old


# ---------------------------------------------------------------- in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
MISSING = [
    name
    for name, there in (
        ("chromium", CHROMIUM),
        ("chromedriver", DRIVER),
        ("the package selenium", importlib.util.find_spec("selenium")),
    )
    if not there
]
in_browser = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
# Every figure, image and table of the page: its name, width and height.
BOXES = """
return [...document.querySelectorAll('figure, figure svg, figure img, table')]
  .map(e => [e.tagName, e.getBoundingClientRect().width, e.getBoundingClientRect().height])
"""
IMAGES = """
return Promise.all([...document.querySelectorAll('svg image')].map(async e => {
  const image = new Image();
  image.src = e.getAttribute('href');
  await image.decode();
  return image.naturalWidth;
}))
"""
COLOURS = """
const of = e => [getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor];
return ['body', 'caption', 'figcaption p', 'a', 'td', 'tr.reference td', '.files']
  .map(name => document.querySelector(name)).filter(e => e).map(of)
"""
# What sticks out of the page to the right and cannot be scrolled to in a box of its own.
OUTSIDE = """
return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, pre, svg, .hidden')
  && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName + '.' + e.className)
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    runs = {
        "small": [made_up.small()],
        "hostile": [hostile()],
        "several": [made_up.diverged(), made_up.in_progress()],
        "many": [made_up.large(lines=12, repeats=2, tasks=8, epochs=2)],
        "images": [made_up.tuned(folder / "tuned")],
    }
    return {name: write_report(given, folder / name)[0] for name, given in runs.items()}


def show(browser, path, width, height, scheme, media="screen"):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(path.as_uri())


def contrast(one, other):
    def luminance(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(390, 844), (1280, 900)], ids=["phone", "desktop"])
@pytest.mark.parametrize("name", ["small", "hostile", "several", "many", "images"])
def test_shown_by_a_browser(name, size, scheme, browser, pages):
    show(browser, pages[name], *size, scheme)
    assert browser.get_log("browser") == []
    boxes = browser.execute_script(BOXES)
    assert sum(tag == "FIGURE" for tag, *_ in boxes) >= 4
    assert all(width > 20 and height > 10 for _, width, height in boxes)
    assert all(width > 0 for width in browser.execute_script(IMAGES))
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.execute_script("return window.innerWidth") == size[0]
    assert browser.execute_script(OUTSIDE) == []
    colours = browser.execute_script(COLOURS)
    assert len(colours) >= 5
    assert all(contrast(*pair) >= 4.5 for pair in colours)
    dark = contrast(colours[0][1], "rgb(0, 0, 0)") < 2
    assert dark == (scheme == "dark")
    assert browser.get_log("browser") == []


@in_browser
def test_print_shows_what_is_collapsed(browser, pages):
    show(browser, pages["small"], 700, 990, "dark", "print")
    height = "return document.querySelector('{}').getBoundingClientRect().height"
    assert browser.execute_script(height.format("details pre")) > 500
    assert browser.execute_script(height.format("details .meanings")) > 50
    style = "return getComputedStyle(document.querySelector('{}')).{}"
    assert browser.execute_script(style.format("details pre", "maxHeight")) == "none"
    assert browser.execute_script(style.format("body", "color")) == "rgb(0, 0, 0)"
    assert browser.execute_script(style.format("figure", "breakBefore")) == "page"
    show(browser, pages["small"], 1280, 900, "light")
    assert not browser.execute_script("return document.querySelector('details pre').checkVisibility()")
