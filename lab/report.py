"""The report: one HTML file that needs no other file, and the pictures that it shows."""

import base64
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import idle
from benchmarks.cases import Case
from benchmarks.measure import Plan
from benchmarks.measure import measure as time_case
from benchmarks.outcome import BUSY_FLAG, NOISY_FLAG
from benchmarks.timing import NOISY, is_noisy
from benchmarks.tokens import OPS
from lab import run, summary
from lab.model import GPT, count_parameters, one_thread, sample
from lab.pictures import draw_pictures
from lab.reading import answer, corrected_reading, reading, recipe
from lab.run import Run
from lab.settings import ARMS, off_policy, settings_to_json
from lab.text import prompt_starts, some_of, windows
from lab.train import SAMPLED, kept

SpeedRow = dict[str, Any]
"""The speed of one implementation of a KL step, as :func:`time_kl_step` returns it."""

PROMPTS = 3
LARGE = (512, 8192)  # the KL step is timed on this shape, and on the run's


@one_thread()
def write_report(experiment: Run) -> Path:
    """Draws the pictures and writes the report. Returns its path."""
    import jinja2

    settings, rows, out = experiment.settings, experiment.rows, experiment.out
    summaries, bins, drifts = (
        summary.summarise(rows, settings),
        summary.measure(rows),
        summary.summarise_drift(rows, settings),
    )
    pictures = draw_pictures(rows, summaries, bins, settings)
    for name, picture in pictures.items():
        run.write(out / name, picture)
    record = json.loads((out / run.SETTINGS).read_bytes())
    now = run.environment(experiment.corpus)
    found = answer(summaries, settings)
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("lab", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["number"] = summary.number
    text = templates.get_template("report_template.html").render(
        s=settings,
        settings={**settings_to_json(settings), "arms": ", ".join(settings.arms), **now},
        began=record["began"],
        begun_by=_written_by(record["environment"]),
        torch=record["environment"]["torch"],
        written=run.now(),
        written_by=_written_by(now),
        answer=found,
        recipe=recipe(found.arm, settings) if found.arm else "",
        chosen={s.name: s for s in summaries}.get(found.arm or ""),
        parameters=count_parameters(experiment.pretraining.model),
        pictures={name: base64.b64encode(data).decode() for name, data in pictures.items()},
        files=run,
        summaries=summaries,
        reading=reading(summaries, settings),
        bins=bins,
        sampled=SAMPLED,
        enough_tokens=summary.ENOUGH_TOKENS,
        enough_steps=summary.ENOUGH_STEPS,
        has_sampler=bool(off_policy(settings.arms)),
        drifts=drifts,
        corrected=corrected_reading(drifts),
        samples=sample_texts(experiment),
        speed=[{**row, "flags": speed_flags(row)} for row in read_speed(out) or []],
        noisy=NOISY,
        busy=f"{idle.LIMIT:.0%}",
    )
    run.write(out / run.REPORT, text.encode())
    return out / run.REPORT


def _written_by(environment: dict[str, Any]) -> str:
    version, commit = (environment[name] or "not known" for name in ("klfast", "commit"))
    return f"klfast {version}, commit {commit}"


def read_speed(out: Path) -> list[SpeedRow] | None:
    """The recorded speed of the KL step, or None before it is timed."""
    path = out / run.SPEED
    return json.loads(path.read_bytes()) if path.exists() else None


def time_kl_step(shape: tuple[int, int]) -> list[SpeedRow]:
    """Times the k3 penalty, fp32, on random tensors of a run's shape and of ``LARGE``.

    There are two steps, the forward to per-sequence sums and the forward+backward of the mean over
    tokens. The two implementations, klfast and the frameworks' eager formula, are interleaved and
    first checked against float64. ``python -m benchmarks`` has ``torch.compile`` too, whose
    compiler takes longer than the rest.

    Returns:
        A dict for each case and implementation. It has ``case``, ``impl``, ``median_ms`` and
        ``min_ms`` of a call, and ``ratio`` (the median over klfast's). ``busy`` tells whether other
        processes took more of the cores' time than allowed (None if that is not known).

    Raises:
        benchmarks.candidates.WrongResult: an implementation computes something else.
    """
    plan, rows = Plan(with_compile=False), []
    for label, size in ((f"{list(shape)} of this run", shape), (f"{list(LARGE)}", LARGE)):
        for step, op in (("forward", OPS["forward"]), ("forward+backward", OPS["one-read"])):
            measured = time_case(Case(op, "fp32", size), plan)
            busy = None if measured.load is None else not measured.load.is_idle
            for row in measured.rows:
                if row["ratio"] is not None:  # but for plain reads
                    numbers = {key: row[key] for key in ("impl", "median_ms", "min_ms", "ratio")}
                    rows.append({"case": f"{step} {label}", **numbers, "busy": busy})
    return rows


def speed_flags(row: SpeedRow) -> str:
    noisy = is_noisy(row["median_ms"], row["min_ms"])
    return ", ".join([NOISY_FLAG] * noisy + [BUSY_FLAG] * bool(row["busy"]))


def sample_texts(experiment: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Held-out prompts, each with continuations by the reference and by every arm's policy."""
    corpus, settings = experiment.corpus, experiment.settings
    models: list[tuple[str, GPT]] = [("reference", experiment.reference)]
    models += [(ARMS[arm.name].label, arm.policy) for arm in experiment.arms.values() if arm.rows]

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(settings.seed)

    def continued(model: GPT, prompts: Tensor) -> list[str]:
        drawn = sample(model, prompts, settings.continuation_length, generator())
        mask = kept(drawn, corpus.end)
        return [corpus.decode(ids[keep]) for ids, keep in zip(drawn, mask, strict=True)]

    starts = prompt_starts(corpus, corpus.held_out, settings.prompt_length)
    starts = some_of(starts, PROMPTS, generator())
    prompts = windows(corpus.held_out, starts, settings.prompt_length)
    texts = [(label, continued(model, prompts)) for label, model in models]
    return [
        (corpus.decode(prompt), [(label, own[i]) for label, own in texts])
        for i, prompt in enumerate(prompts)
    ]
