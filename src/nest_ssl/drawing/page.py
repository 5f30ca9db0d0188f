"""Pages as one HTML file that contains everything and opens without a network. `page.html` has their common style."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from nest_ssl.files import replace_text


def render(package: str, template: str, **values: Any) -> str:
    """Render a template of `package` with `values`: the same values give the same bytes."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package, ""), jinja2.PackageLoader("nest_ssl.drawing", "")]),
        autoescape=True,  # file names come from outside; only the pictures, which escape their own texts, are safe
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template).render(**values)


def write(page: str, path: Path) -> None:
    try:
        replace_text(path, page)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{path}: cannot be written: {reason}. Name another file with --output.") from error
