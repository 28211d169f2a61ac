"""The Prometheus text of /metrics, as far as the checks need it."""

from __future__ import annotations

import re
from dataclasses import dataclass

SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([-+\d.eE]+|[-+]?Inf|NaN)(?: \d+)?$")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """One line: name, labels, value."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Metrics:
    """Every sample of one reading."""

    samples: tuple[Sample, ...]

    @staticmethod
    def parse(text: str) -> Metrics:
        """Read the text format; a line that is no sample is left out."""
        found = (SAMPLE.match(line) for line in text.splitlines() if not line.startswith("#"))
        return Metrics(
            tuple(Sample(m[1], dict(LABEL.findall(m[2] or "")), float(m[3])) for m in found if m)
        )

    def named(self, name: str) -> list[Sample]:
        """Return the samples of a metric; a counter may carry its suffix ``_total``."""
        return [sample for sample in self.samples if sample.name in (name, f"{name}_total")]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over every engine; raises LookupError if the metric is not there."""
        found = [s for s in self.named(name) if labels.items() <= s.labels.items()]
        if not found:
            raise LookupError(f"/metrics has no {name} {labels or ''}")
        return sum(sample.value for sample in found)
