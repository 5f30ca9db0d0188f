"""Pages of one HTML file with everything in it, which open without a network. `page.html` has their common look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2


def render(package: str, template: str, **values: Any) -> str:
    """The page that a template of `package` makes of `values`: the same for the same values, to the byte."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package, ""), jinja2.PackageLoader("nest_ssl.drawing", "")]),
        autoescape=True,  # names of files come from outside; only the pictures, which escape what they hold, are safe
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template).render(**values)


def write(page: str, path: Path) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{path}: cannot be written: {reason}. Name another file with --output.") from error
