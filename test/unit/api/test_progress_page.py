"""The page is one file, and fetches only its own server's data."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files

PAGE = files("sgl_batch.api").joinpath("progress_page.html").read_text("utf-8")


class Reader(HTMLParser):
    """Collects tags, ids, and what labels and descriptions refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(PAGE)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


TAGS = Reader().tags


def test_nothing_is_loaded_from_elsewhere():
    assert not [tag for tag, attributes in TAGS if {"src", "href", "srcset", "data"} & set(attributes)]
    urls = set(re.findall(r"https?://[^\s\"'`]+", PAGE))
    assert urls == {"http://www.w3.org/2000/svg"}, "only the name of a format"
    assert "@import" not in PAGE
    assert "url(" not in PAGE


def test_text_of_the_server_is_never_taken_for_markup():
    assert "innerHTML" not in PAGE
    assert "insertAdjacentHTML" not in PAGE
    assert "eval(" not in PAGE


def test_the_page_is_accessible_and_has_a_dark_mode():
    assert ("html", {"lang": "en"}) in TAGS
    assert "prefers-color-scheme: dark" in PAGE
    ids = {attributes["id"] for _, attributes in TAGS if "id" in attributes}
    referred = {attributes[name] for _, attributes in TAGS for name in ("aria-labelledby", "for") if name in attributes}
    assert referred <= ids
    assert [tag for tag, attributes in TAGS if attributes.get("role") == "status"]
    charts = [attributes for tag, attributes in TAGS if tag == "svg"]
    assert charts
    assert all(chart.get("role") == "img" and chart.get("aria-labelledby") for chart in charts)


def test_every_element_that_the_script_asks_for_is_there():
    asked = set(re.findall(r'\bat\("([\w-]+)"\)', PAGE))
    assert asked <= {attributes.get("id") for _, attributes in TAGS}
    assert asked


def test_charts_and_tables_without_data_say_so():
    empties = [attributes for _, attributes in TAGS if (attributes.get("id") or "").endswith("-empty")]
    assert {one["id"] for one in empties} == {"chart-empty", "calls-empty", "parts-empty"}
    assert PAGE.count("No data yet.") == len(empties)


def test_a_job_shows_its_priority_window_age_and_name():
    panel = PAGE[PAGE.index("function jobPanel") : PAGE.index("function chart")]
    for shown in ('["priority", count(x.priority)]', '["window", job.completion_window]', '["age", '):
        assert shown in panel
    assert ".name || x.name" in panel


def test_a_job_with_a_cost_shows_it():
    panel = PAGE[PAGE.index("function jobPanel") : PAGE.index("function chart")]
    assert "if (x.cost) pairs.push(...costs(x.cost))" in panel
    for key in ("amount", "expected", "per_million_lines", "per_million_output_tokens", "per_million_tokens"):
        assert key in PAGE[PAGE.index("function costs") : PAGE.index("function showHealth")]
