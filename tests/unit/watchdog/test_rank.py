"""The names of stages and of their parts."""

from __future__ import annotations

from nest_ssl.watchdog.rank import FIRST_LAYER, Stage, part_label, validation_part


def test_parts_have_names() -> None:
    assert part_label(Stage.VALIDATION, validation_part(Stage.ENCODER, FIRST_LAYER + 1)) == "encoder layer 1"
    assert part_label(Stage.VALIDATION, validation_part(Stage.DATA)) == "data"
    assert part_label(Stage.DECODER, 0) == ""
