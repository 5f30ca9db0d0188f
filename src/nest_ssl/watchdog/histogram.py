"""Durations in quarter-octave buckets: a count costs one increment, and a quantile is right to 25 %."""

from __future__ import annotations

from collections.abc import Sequence

NUM_BUCKETS = 192
"""Four to an octave: up to 2^48 ns, three days."""


def bucket_of(duration_ns: int) -> int:
    """The bucket of a duration; bucket b holds [lower_edge_ns(b), lower_edge_ns(b + 1))."""
    octave = duration_ns.bit_length()
    if octave <= 3:
        return max(duration_ns, 0)
    return min(4 * octave + ((duration_ns >> (octave - 3)) & 3), NUM_BUCKETS - 1)


def upper_edge_ns(bucket: int) -> int:
    if bucket < 8:
        return bucket + 1
    octave, quarter = divmod(bucket, 4)
    return (5 + quarter) << max(octave - 3, 0)


def quantile_ns(counts: Sequence[int], share: float) -> int | None:
    """A duration that at least `share` of the counted ones do not exceed; None without any."""
    total = sum(counts)
    if total == 0:
        return None
    seen = 0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= share * total:
            return upper_edge_ns(bucket)
    raise AssertionError("the counts of all buckets are the total")
