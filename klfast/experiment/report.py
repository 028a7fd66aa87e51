"""The report: one HTML file that needs no other."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from klfast.experiment.accuracy import ENOUGH_STEPS, ENOUGH_TOKENS, Bin, read_accuracy
from klfast.experiment.errors import SAMPLED
from klfast.experiment.sampler_summary import Drift, read_drift
from klfast.experiment.samples import Sample
from klfast.experiment.settings import Settings, settings_to_json
from klfast.experiment.summary import Summary, number, reading

SpeedRow = dict[str, Any]
"""``case``, ``impl``, ``median_ms``, ``min_ms`` and ``ratio`` (to klfast's median)."""


@dataclass(frozen=True)
class ReportData:
    """All that the report shows."""

    settings: Settings
    environment: dict[str, Any]
    parameters: int
    summaries: list[Summary]
    bins: list[Bin]
    curves: bytes
    estimators: bytes
    sampler: bytes | None
    drifts: list[Drift]
    samples: list[Sample]
    speed: list[SpeedRow]


def render_report(data: ReportData) -> bytes:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("klfast.experiment", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    text = environment.get_template("report_template.html").render(
        data=data,
        reading=reading(data.summaries, data.settings),
        accuracy=read_accuracy(data.bins),
        sampled=SAMPLED,
        lengths=sorted({(one.first, one.last) for s in data.summaries for one in s.lengths}),
        enough_tokens=ENOUGH_TOKENS,
        enough_steps=ENOUGH_STEPS,
        settings={**settings_to_json(data.settings), "arms": ", ".join(data.settings.arms)},
        curves=base64.b64encode(data.curves).decode(),
        estimators=base64.b64encode(data.estimators).decode(),
        sampler=base64.b64encode(data.sampler or b"").decode(),
        drift=read_drift(data.drifts, data.settings),
    )
    return text.encode()
