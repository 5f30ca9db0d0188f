from __future__ import annotations

from itertools import chain

import pytest
import torch

from nest_ssl.probe.attentive import AttentiveHead, AttentiveStatistics, _at_least_two


@pytest.mark.parametrize(
    ("sizes", "joined"), [([1, 1, 1], [3]), ([1, 3, 1], [5]), ([2, 1, 1, 2], [2, 2, 2]), ([1], [1]), ([4, 1], [5])]
)
def test_no_batch_of_the_attentive_head_is_one_utterance(sizes: list[int], joined: list[int]) -> None:
    batches = [[10 * place + item for item in range(size)] for place, size in enumerate(sizes)]
    out = _at_least_two(batches)
    assert [len(batch) for batch in out] == joined
    assert sorted(chain(*out)) == sorted(chain(*batches))


def test_attentive_statistics_do_not_see_padding() -> None:
    torch.manual_seed(0)
    pool = AttentiveStatistics(6)
    x = torch.randn(2, 6, 9)
    longer = torch.nn.functional.pad(x, (0, 5), value=7.0)
    length = torch.tensor([9, 4])
    torch.testing.assert_close(pool(x, length), pool(longer, length), atol=1e-6, rtol=0)
    assert torch.isfinite(pool(x, torch.tensor([9, 0]))).all()


def test_the_attentive_head_weighs_layers_equally_at_first() -> None:
    head = AttentiveHead(4, 6, 3)
    assert head.layer_weights == [0.25] * 4
    assert head([torch.randn(2, 6, 9)] * 4, torch.tensor([9, 5])).shape == (2, 3)
