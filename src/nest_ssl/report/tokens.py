"""The picture of an utterance: clean, noisy and masked features, and below them the true and the predicted tokens."""

from __future__ import annotations

from html import escape
from pathlib import Path

from nest_ssl.drawing.draw import line, rect, svg, text
from nest_ssl.drawing.lanes import GAP, LEFT, MEL_HEIGHT, PLOT, WIDTH, mask_lane, mel_lane, mel_range, time_axis
from nest_ssl.report.examples import TOP, ExampleTokens

MAX_BOOKS = 4
"""Books whose tokens are drawn."""
TOKEN_HEIGHT = 32
HATCH = (
    '<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch-ground" width="4" height="4"/><rect class="hatch-line" width="1.6" height="4"/>'
    "</pattern></defs>"
)
"""For those who do not see the colours: right is filled, among the first is hatched, wrong is empty."""


def tokens_picture(example: ExampleTokens) -> str:
    """Everything over the same seconds; numbers of codes stand under the tokens that count."""
    colours = mel_range((example.clean_MT, example.noisy_MT))
    lanes = (
        (["clean mel", "gives the", "targets"], example.clean_MT),
        (["noisy mel", "" if example.is_noisy else "(none added)"], example.noisy_MT),
        (["masked mel", "enters the", "encoder"], example.masked_MT),
    )
    parts, y = [HATCH], 8.0
    for words, mels_MT in lanes:
        if mels_MT is not None:
            parts += mel_lane(y, list(filter(None, words)), mels_MT, colours, example.band_hz)
            y += MEL_HEIGHT + GAP
    parts += mask_lane(y, example.mask_T)
    y += 9 + GAP
    num_books = example.true_SH.shape[1]
    for book in range(min(num_books, MAX_BOOKS)):
        parts += _book(y, example, book, f" {book + 1}" if num_books > 1 else "")
        y += 2 * TOKEN_HEIGHT + GAP + 4
    parts += time_axis(len(example.mask_T) * example.frame_s, y - GAP + 4, "seconds")
    return svg(WIDTH, y + 36, parts, escape(f"Tokens of {Path(example.name).name}"))


def _book(y: float, example: ExampleTokens, book: int, number: str) -> list[str]:
    """Two rows: true codes, predicted codes."""
    width = PLOT / example.num_drawn
    parts = [
        rect(LEFT, y, PLOT, 2 * TOKEN_HEIGHT, "lane"),
        text(LEFT - 8, y + TOKEN_HEIGHT / 2 + 4, f"true{number}", "name", "end"),
        text(LEFT - 8, y + 1.5 * TOKEN_HEIGHT + 4, f"predicted{number}", "name", "end"),
    ]
    for s in example.masked_S.nonzero()[0].tolist():
        x = LEFT + s * width
        true, predicted, rank = (int(a[s, book]) for a in (example.true_SH, example.predicted_SH, example.rank_SH))
        kind = "right" if rank == 1 else "near" if rank <= TOP else "wrong"
        at_s = s * example.frames_per_token * example.frame_s
        title = f"{at_s:.2f} s: true {true}, predicted {predicted}; the true code comes at place {rank:,}"
        parts.append(rect(x + 0.5, y + TOKEN_HEIGHT + 1, width - 1, TOKEN_HEIGHT - 2, kind, title))
        parts.append(_upright(x + width / 2, y + TOKEN_HEIGHT - 3, true, "code"))
        parts.append(_upright(x + width / 2, y + 2 * TOKEN_HEIGHT - 4, predicted, f"code on-{kind}"))
    parts.append(line(LEFT, y + TOKEN_HEIGHT, LEFT + PLOT, y + TOKEN_HEIGHT, "grid"))
    return parts


def _upright(x: float, y: float, number: int, kind: str) -> str:
    """A number that reads from below to above, beginning at `y`."""
    return f'<text class="{kind}" transform="translate({x + 3:.1f} {y:.1f}) rotate(-90)">{number}</text>'
