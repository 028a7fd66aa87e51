"""The report: one HTML file that needs no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import idle
from benchmarks.outcome import flags_text
from benchmarks.timing import NOISY, is_noisy
from lab import folder
from lab.accuracy import ENOUGH_STEPS, ENOUGH_TOKENS, SAMPLED, Bin, read_accuracy
from lab.answer import answer, reading
from lab.arms import off_policy
from lab.palette import style_sheet
from lab.pictures import Picture
from lab.recipe import recipe
from lab.samples import Sample
from lab.settings import Settings, settings_to_json
from lab.summary import Drift, Summary, read_drift
from lab.words import number

SpeedRow = dict[str, Any]
"""A dict of ``benchmarks.time_kl_step``."""


@dataclass(frozen=True)
class ReportData:
    """All that the report shows.

    Attributes:
        beginning: when the run began, and in what environment.
        environment: in which the report was written.
        written: when.
        pictures: by the names of their files.
    """

    settings: Settings
    beginning: dict[str, Any]
    environment: dict[str, Any]
    written: str
    parameters: int
    summaries: list[Summary]
    bins: list[Bin]
    pictures: dict[str, Picture]
    drifts: list[Drift]
    samples: list[Sample]
    speed: list[SpeedRow]


def render_report(data: ReportData) -> bytes:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lab", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    found = answer(data.summaries, data.settings)
    text = environment.get_template("report_template.html").render(
        data=data,
        colors=style_sheet(),
        written_by=_written_by(data.environment),
        begun_by=_written_by(data.beginning),
        answer=found,
        recipe=recipe(found.arm, data.settings) if found.arm else "",
        chosen={s.name: s for s in data.summaries}.get(found.arm or ""),
        files=folder,
        reading=reading(data.summaries, data.settings),
        accuracy=read_accuracy(data.bins),
        sampled=SAMPLED,
        lengths=sorted({(one.first, one.last) for s in data.summaries for one in s.lengths}),
        enough_tokens=ENOUGH_TOKENS,
        enough_steps=ENOUGH_STEPS,
        settings={**settings_to_json(data.settings), "arms": ", ".join(data.settings.arms)},
        has_sampler=bool(off_policy(data.settings.arms)),
        drift=read_drift(data.drifts, data.settings),
        speed=[{**row, "flags": speed_flags(row)} for row in data.speed],
        noisy=NOISY,
        busy=f"{idle.LIMIT:.0%}",
    )
    return text.encode()


def _written_by(environment: dict[str, Any]) -> str:
    version, commit = (environment.get(name) or "not known" for name in ("klfast", "commit"))
    return f"klfast {version}, commit {commit}"


def speed_flags(row: SpeedRow) -> str:
    """The flags against a row's times."""
    return flags_text(is_noisy(row["median_ms"], row["min_ms"]), bool(row["busy"]))
