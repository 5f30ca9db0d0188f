"""What is in a page."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Addresses and tags of a page; void and unclosed ones are told apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "line", "image"):
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "srcset")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_needs_no_network(text: str) -> Page:
    """The page is well formed, and everything it shows is in it."""
    page = Page(text)
    assert page.open == []
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text.replace("url(#", "")  # a pattern of the page itself
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    return page
