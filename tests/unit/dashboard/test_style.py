"""The style: readable colours, nothing inline, and limits on size."""

import re
from itertools import product
from pathlib import Path

import pytest

import perdure.dashboard

FOLDER = Path(perdure.dashboard.__file__).parent
CSS = (FOLDER / "static" / "dashboard.css").read_text()
PAIRS = dict(re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}, #[0-9a-f]{6})\)", CSS))
THEMES = ("light", "dark")
BACKGROUNDS = ("bg", "surface", "selected")
TEXTS = (
    "text", "muted", "accent", "queued", "running", "suspended", "waiting", "paused", "completed",
    "failed", "cancelled",
)  # fmt: skip
TEMPLATES = sorted((FOLDER / "templates").iterdir())


def colour(name: str, theme: str) -> str:
    return str(PAIRS[name].split(", ")[THEMES.index(theme)])


def luminance(colour: str) -> float:
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_button_is_not_in_a_paragraph() -> None:
    """Links in paragraphs are underlined."""
    paragraphs = re.compile(r"<p\b(?:(?!</p>).)*<a class=\"button", re.DOTALL)
    assert not [page.name for page in TEMPLATES if paragraphs.search(page.read_text())]


@pytest.mark.parametrize(("name", "background", "theme"), [*product(TEXTS, BACKGROUNDS, THEMES)])
def test_text_can_be_read_on_every_background(name: str, background: str, theme: str) -> None:
    assert contrast(colour(name, theme), colour(background, theme)) >= 4.5


@pytest.mark.parametrize(("background", "theme"), [*product(BACKGROUNDS, THEMES)])
def test_controls_can_be_seen_on_every_background(background: str, theme: str) -> None:
    assert contrast(colour("control", theme), colour(background, theme)) >= 3


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ["accent", "failed"])
def test_text_on_buttons_can_be_read(name: str, theme: str) -> None:
    assert contrast(colour("on-accent", theme), colour(name, theme)) >= 4.5


def test_the_contrast_of_black_and_white_is_known() -> None:
    assert round(contrast("#000000", "#ffffff"), 1) == 21.0


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_has_no_code_or_style_of_its_own(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", text)
    assert "| safe" not in text
    assert "autoescape false" not in text
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)


@pytest.mark.parametrize("path", sorted((FOLDER / "static").iterdir()), ids=lambda path: path.name)
def test_a_static_file_loads_nothing_from_elsewhere(path: Path) -> None:
    assert not re.search(r"https?:|@import|url\((?!#)", path.read_text())


def lines_of(path: Path) -> int:
    return path.read_text().count("\n")


def test_the_dashboard_stays_small() -> None:
    modules = list(FOLDER.rglob("*.py"))
    assert sum(map(lines_of, modules)) <= 1800
    assert max(map(lines_of, modules)) <= 400
    assert sum(map(lines_of, TEMPLATES)) <= 1200
    assert len(CSS.encode()) <= 30 * 1024
    scripts = (FOLDER / "static").glob("*.js")
    assert sum(path.stat().st_size for path in scripts) <= 10 * 1024
