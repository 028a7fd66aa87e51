"""One call that logs the KL's numbers to a tracker or to JSON lines."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from klfast.args.checks import check_choice
from klfast.args.keywords import explains_keywords
from klfast.controllers.grouped import GroupedKLController
from klfast.controllers.inputs import NUMBER, check_count, number_of
from klfast.functional.profile import LogRatioProfile
from klfast.stats.kl import OF_TOKENS, KLStats, gathered
from klfast.stats.rollout import RolloutStats
from klfast.stats.transfer import floats

__all__ = ["KLLog"]

Names = Literal["klfast", "nemo_rl", "openrlhf", "roll", "skyrl", "slime", "trl", "trlx", "verl"]

# Framework -> its names for what klfast measures. The names are from their trainers: NeMo-RL's
# loss_functions.py, OpenRLHF's ppo_actor.py, ROLL's apply_kl_penalty, SkyRL's trainer.py, slime's
# loss.py, TRL's grpo_trainer.py (klfast's callback writes kl_coef), trlx's
# accelerate_ppo_trainer.py, verl's apply_kl_penalty and dp_actor.py.
_FRAMEWORKS: dict[str, dict[str, tuple[str, ...]]] = {
    "klfast": {},
    "nemo_rl": {"token_mean": ("kl_penalty",)},
    "openrlhf": {"token_mean": ("kl",)},
    "roll": {"token_mean": ("critic/kl",), "coef": ("critic/kl_coef",)},
    "skyrl": {"token_mean": ("loss/avg_kl",), "coef": ("loss/kl_loss_coef",)},
    "slime": {"token_mean": ("train/kl_loss",)},
    "trl": {"token_mean": ("kl",), "coef": ("kl_coef",)},
    "trlx": {
        "sqrt_sequence_mean": ("policy/sqrt_kl",),
        "sqrt_token_mean": ("policy/kl_per_token",),
        "coef": ("kl_ctl_value",),
    },
    "verl": {
        "token_mean": ("actor/kl_loss", "actor/reward_kl_penalty"),
        "coef": ("actor/kl_coef", "actor/reward_kl_penalty_coeff"),
    },
}

Writer = Callable[[dict[str, float], int], None]


class KLLog:
    """Writes the KL's numbers of a step, with one transfer from the device.

    Make it with ``log = klfast.KLLog("runs/kl.jsonl")``, and in every step call
    ``log(step, stats, controller=controller, rollout=corrected.stats)``. It writes klfast's own
    names, such as ``kl/token_mean``, in nats. It can also write the names that a framework's
    dashboards use.

    Args:
        to: a tracker: ``"tensorboard"`` or ``"tensorboard:FOLDER"``, ``"wandb"`` or
            ``"wandb:PROJECT"``, ``"trackio"`` or ``"trackio:PROJECT"``, ``"mlflow"`` or
            ``"mlflow:EXPERIMENT"``. The log writes to the tracker's current run, or to a new one.
            A path that ends in ``.jsonl`` is a file of JSON lines, to which the log appends. You
            can also pass a module or an object with ``add_scalar(name, value, step)``,
            ``log(values, step=step)`` or ``log_metrics(values, step=step)``. A tracker is imported
            only when it is asked for.
        names: ``"klfast"``, or a framework, whose names for the mean KL and the coefficient are
            written too: ``"nemo_rl"``, ``"openrlhf"``, ``"roll"``, ``"skyrl"``, ``"slime"``,
            ``"trl"``, ``"trlx"`` (which logs square roots), ``"verl"``.
        prefix: the prefix of klfast's own names.

    A log to a file can be pickled, and then appends to the same file. Any other log raises
    TypeError, because its writer belongs to this process. Copies share the original's writer.

    Raises:
        TypeError: ``to`` is none of these.
        ValueError: ``names`` is unknown, or a string or path is neither a tracker nor ends in
            ``.jsonl``.
        ImportError: the package that ``to`` names is not installed.
    """

    @explains_keywords
    def __init__(self, to: Any, *, names: Names = "klfast", prefix: str = "kl/") -> None:
        check_choice("names", names, get_args(Names))
        self.names, self.prefix = names, prefix
        self._write = _writer(to)

    @explains_keywords
    def __call__(
        self,
        step: int,
        stats: KLStats | RolloutStats | None = None,
        *,
        rollout: RolloutStats | None = None,
        controller: Any = None,
        monitor: Any = None,
        profile: LogRatioProfile | None = None,
        extra: Mapping[str, float | Tensor] | None = None,
    ) -> dict[str, float]:
        """Write one step, and return the written numbers.

        Args:
            step: >= 0.
            stats: statistics of the step's batch, written under ``prefix``. The statistics that
                exact divergences lack without ``token_ids`` are left out. A ``RolloutStats`` here
                is taken as ``rollout``.
            rollout: statistics of :func:`klfast.rollout_correction`, written under ``rollout/`` as
                by their ``as_dict``.
            controller: klfast's, or any :class:`klfast.KLController`. The log writes its ``coef``
                and, if it has one, its ``skipped``. For a ``GroupedKLController`` it writes them
                for each group.
            monitor: a ``KLMonitor`` or ``KLDriftAlarm``. The log writes ``alarm``, which is 1 while
                the status is not ``"ok"``.
            profile: see :func:`klfast.log_ratio_profile`.
            extra: further numbers by their whole names.

        Raises:
            ValueError: ``step`` is negative, or an extra has a name that is already used.
            TypeError: ``step`` is not an integer, an extra is not one number, or ``stats``,
                ``rollout``, ``controller`` or ``monitor`` has the wrong type.
        """
        step = check_count("step", step, least=0)
        # A loop without a reference has only these.
        if isinstance(stats, RolloutStats) and rollout is None:
            stats, rollout = None, stats
        _check_is("stats", stats, KLStats)
        _check_is("rollout", rollout, RolloutStats)
        own: dict[str, Any] = {}
        if stats is not None:
            # The log writes numbers of all ranks, which statistics of DTensors have only as a
            # whole.
            own |= KLStats(*map(gathered, stats)).as_dict("")
        if controller is not None:
            own |= _of_controller(controller)
        if monitor is not None:
            _check_has("monitor", monitor, "a KLMonitor or a KLDriftAlarm", "status")
            # Trackers plot numbers alone.
            own["alarm"] = float(monitor.status != "ok")
        if profile is not None:
            own |= profile.as_dict("")
        beside = {} if rollout is None else rollout.as_dict()
        extras = {name: gathered(value) for name, value in (extra or {}).items()}
        # An extra may have the name of a statistic until its prefix is there. The sign keeps both.
        given = {f"={name}": value for name, value in {**beside, **extras}.items()}
        numbers = _floats({**own, **given})
        # Exact divergences without ``token_ids`` have NaN for the statistics of tokens.
        are_nan = all(math.isnan(numbers.get(name, 0.0)) for name in OF_TOKENS)
        if are_nan and numbers.get("nonfinite") == 0:
            own = {name: value for name, value in own.items() if name not in OF_TOKENS}
        written = {self.prefix + name: numbers[name] for name in own}
        known = {name: numbers[name] for name in own}
        for name in known.keys() & {"token_mean", "sequence_mean"}:
            # max keeps a NaN that comes first.
            known[f"sqrt_{name}"] = math.sqrt(max(known[name], 0.0))
        written |= {
            theirs: known[name]
            for name, all_theirs in _FRAMEWORKS[self.names].items()
            if name in known
            for theirs in all_theirs
        }
        written |= {name: numbers[f"={name}"] for name in beside}
        for name in extras:
            # A tracker would overwrite the number of that name.
            if name == "step" or name in written:
                raise ValueError(f"extra must not have a name that KLLog writes, got {name!r}")
        written |= {name: numbers[f"={name}"] for name in extras}
        self._write(written, step)
        return written


def _of_controller(controller: Any) -> dict[str, Any]:
    _check_has("controller", controller, "a controller, klfast's or a KLController", "value")
    if isinstance(controller, GroupedKLController):
        groups = controller.groups.items()
        return {
            f"{name}/{key}": v for name, part in groups for key, v in _of_controller(part).items()
        }
    counted = {"skipped": controller.skipped} if hasattr(controller, "skipped") else {}
    return {"coef": controller.value, **counted}


def _check_is(argument: str, given: object, kind: type) -> None:
    if given is not None and not isinstance(given, kind):
        raise TypeError(f"{argument} must be a {kind.__name__} or None, got {type(given).__name__}")


def _check_has(argument: str, given: object, wanted: str, name: str) -> None:
    if not hasattr(given, name):
        raise TypeError(f"{argument} must be {wanted}, got {type(given).__name__}")


def _floats(values: dict[str, Any]) -> dict[str, float]:
    """The numbers and 0-dim tensors as floats, with one transfer from a device."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if tensor.dim() != 0 or tensor.is_complex():
            raise TypeError(
                f"extra must be numbers and 0-dim tensors, got {[*tensor.shape]} for "
                f"{name.removeprefix('=')!r}"
            )
    read = floats(tensors)
    return {
        name: read[name] if name in read else number_of(value, f"extra[{name[1:]!r}]", NUMBER)
        for name, value in values.items()
    }


def _writer(to: Any) -> Writer:
    trackers = ", ".join(map(repr, _TRACKERS))
    if isinstance(to, str):
        package, _, rest = to.partition(":")
        if package in _TRACKERS:
            try:
                return _Tracker(_run(package, rest))
            except ImportError as error:
                raise ImportError(
                    f"to={package!r} needs {package}: pip install {package}"
                ) from error
    if isinstance(to, (str, os.PathLike)):
        # Another text is a misspelt tracker more often than a path.
        if Path(to).suffix != ".jsonl":
            raise ValueError(
                f"to must be one of {trackers}, or a path that ends in .jsonl, got {to!r}"
            )
        return _JsonLines(Path(to))
    if not any(callable(getattr(to, method, None)) for method in _METHODS):
        raise TypeError(
            f"to must be {trackers}, a path, or an object with add_scalar, log or log_metrics, got "
            f"{type(to).__name__}"
        )
    return _Tracker(to)


_TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
# In this order, because some trackers have several.
_METHODS = ("add_scalar", "log", "log_metrics")


def _run(package: str, rest: str) -> Any:
    """A tracker's current run or a new one, whose folder or project is behind the colon."""
    # The package alone has no writer.
    module = "torch.utils.tensorboard" if package == "tensorboard" else package
    tracker = importlib.import_module(module)
    if package == "tensorboard":
        return tracker.SummaryWriter(rest or None)
    if package == "wandb":
        return tracker.run if tracker.run is not None else tracker.init(project=rest or None)
    if package == "trackio":
        # trackio.log finds a run in the thread alone that began it.
        run = tracker.context_vars.current_run.get()
        return run if run is not None else tracker.init(project=rest or "klfast")
    if rest:
        tracker.set_experiment(rest)
    # mlflow begins a run by itself where none is active.
    return tracker


class _Tracker:
    """A writer that belongs to this process. Copies share it, and it cannot be pickled."""

    def __init__(self, to: Any) -> None:
        self._to = to
        self._method = next(each for each in _METHODS if callable(getattr(to, each, None)))

    def __call__(self, values: dict[str, float], step: int) -> None:
        write = getattr(self._to, self._method)
        if self._method != "add_scalar":
            write(values, step=step)
            return
        for name, value in values.items():
            write(name, value, step)

    def __deepcopy__(self, memo: Any) -> _Tracker:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "to must be a path for a KLLog to be pickled, got a writer of this process, "
            f"{type(self._to).__name__}; make a KLLog in the other process"
        )


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, values: dict[str, float], step: int) -> None:
        # JSON has no NaN and no infinity
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        line = json.dumps({"step": step, **finite}, allow_nan=False) + "\n"
        # Opened for each line, so that a run that dies has written all of them, and a log can be
        # pickled.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)

    def __reduce__(self) -> Any:
        return _JsonLines, (self._path,)
