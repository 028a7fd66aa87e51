"""One object for a run: a call for each micro-batch, a step for each batch."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor

from klfast.args.checks import check_choice, check_number, reduction_of, shown
from klfast.args.estimator import Estimator, as_estimator
from klfast.args.keywords import COEFFICIENTS, explains_keywords
from klfast.backends import BACKENDS
from klfast.controllers.base import STATE_VERSION, CoefficientController, check_state, warn_caller
from klfast.controllers.grouped import GroupedKLController, KLController
from klfast.controllers.inputs import Unit
from klfast.controllers.target import FixedKLController
from klfast.distributed import is_dtensor
from klfast.distributed.ranks import Ranks, members_of, ranks_of
from klfast.functional.hidden import linear_kl_divergence
from klfast.functional.logits import kl_divergence
from klfast.functional.penalty import kl_penalty
from klfast.stats.kl import KLStats, gathered
from klfast.stats.outputs import KLDivergence
from klfast.stats.transfer import floats, json_of, numbers_of
from klfast.types.names import BackendName, EstimatorName, ReductionName

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["KLPenalty"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class KLPenalty:
    """The KL penalty of a training run: its loss, its statistics and its coefficient.

    ::

        penalty = klfast.KLPenalty(controller=klfast.NuPIKLController(0.1, target=6.0))
        for batch in batches:
            for logprobs, ref_logprobs, mask in micro_batches(batch):
                loss = policy_loss(logprobs, mask) + penalty(logprobs, ref_logprobs, mask)
                loss.backward()
            optimizer.step()
            numbers = penalty.step()  # "kl/token_mean", "kl/coef", ...

    A call computes :func:`klfast.kl_penalty` with the controller's coefficient. (``from_logits``
    and ``from_hidden`` compute the exact KL of :func:`klfast.kl_divergence`.) It returns the
    reduced penalty, ``coef * KL`` in nats times the coefficient's unit. It keeps the statistics of
    its sequences, [8, S] numbers on their device, until ``step``. It waits for no device, and works
    with or without gradients, under autocast and inside of ``torch.compile``. Call it outside of
    activation checkpointing, because a call that runs twice is counted twice. Threads may call at
    the same time, unless ``torch.compile`` has compiled a call. A call during a ``step`` belongs to
    this step or to the next.

    Args:
        estimator: a name or an :class:`klfast.Estimator`. The default ``"k3+"`` has the value of k3
            and the gradient of k2. Its expected gradient is the gradient of the reverse KL,
            on-policy, and off-policy with ``old_logprobs``.
        reduction: as in :func:`klfast.kl_penalty`.
        controller: a controller with one coefficient, klfast's or your own
            (:class:`klfast.KLController`), or a number >= 0 for a fixed coefficient. None means 1,
            for a coefficient that is applied elsewhere.
        unit: ``"sequence"`` or ``"token"``, the unit of the controller's target. A controller with
            another unit is an error. None checks nothing.
        cu_seqlens: the default for every call without its own.
        backend: as in :func:`klfast.kl_penalty`.

    Attributes:
        controller: the controller, a ``FixedKLController`` for a number or None.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a choice is unknown, a number is negative or not finite, or ``unit`` is not the
            controller's unit.
    """

    _normalizer: float | Tensor | None = None
    _warned_of_normalizer = False

    @explains_keywords
    def __init__(
        self,
        estimator: EstimatorName | Estimator = "k3+",
        reduction: ReductionName = "token-mean",
        *,
        controller: KLController | float | None = None,
        unit: Unit | None = None,
        cu_seqlens: Tensor | None = None,
        backend: BackendName = "auto",
    ) -> None:
        # Here, so that a wrong setting fails before the first batch.
        reduction_of(reduction, is_normalized=False)
        check_choice("backend", backend, ("auto", *BACKENDS))
        self.estimator = as_estimator(estimator)
        self.reduction = reduction
        self.controller = _controller(controller)
        if unit is not None:
            check_choice("unit", unit, get_args(Unit))
            own = getattr(self.controller, "unit", unit)
            if unit != own and not isinstance(self.controller, FixedKLController):
                raise ValueError(f"unit must be the controller's, {own!r}, got {unit!r}")
        self.cu_seqlens = cu_seqlens
        self.backend = backend
        self._pending = _PendingStats([])

    @property
    def coef(self) -> Any:
        """The coefficient of the next call, the controller's ``value``."""
        return self.controller.value

    @explains_keywords
    def __call__(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        mask: Tensor | None = None,
        *,
        old_logprobs: Tensor | None = None,
        weights: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """``coef`` times the reduced penalty of a micro-batch, as in :func:`klfast.kl_penalty`.

        With gradient accumulation or several ranks, pass ``normalizer``, see
        :func:`klfast.data_parallel_normalizer`. The micro-batches' losses then sum to the mean of
        the whole batch. ``weights`` scale the loss alone. The statistics, and so the controller,
        see the KL without them.

        Raises:
            ValueError, TypeError, RuntimeError: as :func:`klfast.kl_penalty`. No statistics are
                then kept.
            RuntimeError: inside of torch.func transforms, which statistics cannot leave.
        """
        settings = self._settings(kl_penalty, {"cu_seqlens": cu_seqlens}, normalizer)
        found: tuple[Tensor, KLStats] = kl_penalty(
            logprobs,
            ref_logprobs,
            mask,
            estimator=self.estimator,
            old_logprobs=old_logprobs,
            weights=weights,
            return_stats=True,
            **settings,
        )
        penalty, stats = found
        self._keep(stats, mask, weights, normalizer)
        return penalty

    def from_logits(
        self,
        logits: Tensor,
        ref_logits: Tensor,
        mask: Tensor | None = None,
        *,
        normalizer: float | Tensor | None = None,
        **options: Any,
    ) -> Any:
        """``coef`` times the reduced exact KL over the vocabulary, in place of an estimate of it.

        A call computes :func:`klfast.kl_divergence` with the object's reduction and coefficient.
        Its statistics count in ``step`` like the statistics of other calls. ``estimator`` has no
        effect.

        Example::

            loss = penalty.from_logits(logits, ref_logits, mask, temperature=0.7)

        Args:
            logits: the policy's, [B, T, V], or packed [N, V] with ``cu_seqlens``.
            ref_logits: the reference's, in the same shape.
            mask: [B, T] or [N], as in :func:`klfast.kl_divergence`.
            normalizer: as in :func:`klfast.kl_divergence`.
            options: its other options, such as ``weights``, ``direction`` and ``temperature``.
                ``cu_seqlens`` and ``backend`` default to the object's. With ``group=`` (vocabulary
                shards), ``step`` counts each sequence once.

        Returns:
            A tensor, the loss. With ``token_ids`` or ``return_entropy``, a
            :class:`klfast.KLDivergence`, whose ``kl`` is the loss and whose ``stats`` is None.

        Raises:
            ValueError, TypeError, RuntimeError: as :func:`klfast.kl_divergence`. No statistics are
                then kept.
            TypeError: an option belongs to the object (``reduction``, ``coef``, ``return_stats``).
            RuntimeError: inside of torch.func transforms, which statistics cannot leave.
        """
        settings = self._settings(kl_divergence, options, normalizer)
        outputs = kl_divergence(logits, ref_logits, mask, return_stats=True, **settings)
        return self._loss_of(outputs, mask, normalizer, options)

    def from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        ref_hidden: Tensor,
        ref_weight: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        normalizer: float | Tensor | None = None,
        **options: Any,
    ) -> Any:
        """``coef`` times the reduced exact KL, from hidden states and heads, without the logits.

        A call computes :func:`klfast.linear_kl_divergence` with the object's reduction and
        coefficient. Otherwise it works as :meth:`from_logits`.

        Example::

            loss = penalty.from_hidden(hidden, head.weight, ref_hidden, ref_head.weight, mask)

        Args:
            hidden: the policy's last hidden states, [B, T, D], or packed [N, D].
            weight: the policy's head, [V, D].
            ref_hidden: the reference's hidden states, [B, T, D_ref] or [N, D_ref].
            ref_weight: the reference's head, [V, D_ref], or None for the policy's.
            mask: [B, T] or [N], as in :func:`klfast.linear_kl_divergence`.
            normalizer: as in :func:`klfast.linear_kl_divergence`.
            options: its other options, such as ``weights``, ``bias``, ``softcap`` and ``chunk``.
                ``cu_seqlens``, ``backend`` and ``group`` as in :meth:`from_logits`.

        Returns:
            As :meth:`from_logits`.

        Raises:
            ValueError, TypeError, RuntimeError: as :func:`klfast.linear_kl_divergence` and
                :meth:`from_logits`. No statistics are then kept.
        """
        settings = self._settings(linear_kl_divergence, options, normalizer)
        outputs = linear_kl_divergence(
            hidden, weight, ref_hidden, ref_weight, mask, return_stats=True, **settings
        )
        return self._loss_of(outputs, mask, normalizer, options)

    def _settings(
        self,
        function: Callable[..., Any],
        options: dict[str, Any],
        normalizer: float | Tensor | None,
    ) -> dict[str, Any]:
        for name in ("reduction", "return_stats", *COEFFICIENTS):
            if name in options:
                raise TypeError(f"{name} must be left to the KLPenalty, got {shown(options[name])}")
        is_traced = torch.compiler.is_dynamo_compiling()
        if not is_traced and torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "KLPenalty gathers statistics, which cannot leave a torch.func transform; call "
                f"klfast.{function.__name__} there"
            )
        # Read once: another thread may step between two reads.
        value = self.controller.value
        settings = {"backend": self.backend, **options}
        # A caller passes None for "the object's".
        if settings.get("cu_seqlens") is None:
            settings["cu_seqlens"] = self.cu_seqlens
        # ``step`` may change a tensor before the backward reads it.
        settings["coef"] = value.clone() if isinstance(value, Tensor) else value
        return {**settings, "reduction": self.reduction, "normalizer": normalizer}

    def _keep(
        self,
        stats: KLStats,
        mask: Tensor | None,
        weights: Tensor | None,
        normalizer: float | Tensor | None,
        group: Any = None,
    ) -> None:
        """Keep the statistics of a call for ``step``. ``group``: the ranks with its vocabulary."""
        is_weighted = weights is not None or (mask is not None and mask.is_floating_point())
        # A floating mask may sum to less than the tokens, and so may a mask beside weights, as
        # after rejection. A right normalizer would look too large.
        self._normalizer = None if is_weighted else normalizer
        # The names of ranks and not the group, which no checkpoint can hold.
        part = _Part(stats, () if group is None else members_of(group))
        # A compiled call makes an object in place of appending (see _PendingStats).
        if torch.compiler.is_dynamo_compiling():
            self._pending = _PendingStats([part], self._pending)
        else:
            self._pending.newest.append(part)

    def _loss_of(
        self,
        outputs: KLDivergence,
        mask: Tensor | None,
        normalizer: float | Tensor | None,
        options: dict[str, Any],
    ) -> Tensor | KLDivergence:
        """The loss, or all outputs if the options ask for more, without the statistics."""
        assert outputs.stats is not None
        weights, group = options.get("weights"), options.get("group")
        self._keep(outputs.stats, mask, weights, normalizer, group)
        # Only such a call has more to return than its loss.
        if options.get("token_ids") is None and not options.get("return_entropy"):
            return outputs.kl
        return outputs._replace(stats=None)

    @torch.no_grad()
    def step(self, group: ProcessGroup | None = None) -> dict[str, float]:
        """Update the controller once with all sequences since the last step, and forget them.

        The update does not depend on how the sequences were split into micro-batches and over
        ranks. It is the update for one batch of all sequences, in the order of ranks and calls. A
        controller with a ``process_group`` updates through its own all-reduce, in fp64.

        Ranks that shared a vocabulary (``group=`` in ``from_logits`` or ``from_hidden``) have the
        same sequences. The first of them in the step's group counts the sequences of that call, and
        the others do not. Every rank counts the sequences of its other calls.

        Args:
            group: the ranks with different sequences, and any ranks that shared their vocabulary.
                All must call, even ranks without sequences. None means the controller's
                ``process_group``, else all ranks if torch.distributed is initialised, else this
                process alone.

        Returns:
            The numbers of ``KLStats.as_dict()`` over these sequences, as floats. ``"kl/coef"`` is
            the coefficient from now on. ``"kl/skipped"`` is the number of KLs that the controller
            has left out, if it counts them. The keys are the same in every step. A number may be
            NaN or inf. ``"kl/nonfinite"`` counts the tokens whose log-ratio or penalty is NaN or
            inf. In one process, the numbers need one transfer from the device.

        Raises:
            RuntimeError: nothing was called since the last step, in a run of one process.
                torch.distributed raises it if a rank has died or does not answer in time.
            ValueError: ``group`` is not the controller's, or is given for DTensors, whose
                statistics are already complete on every rank.
            TypeError: ``group`` is not a process group that this process is in.
        """
        parts, own = self._pending.parts(), getattr(self.controller, "process_group", None)
        # Statistics of DTensors are complete on every rank.
        are_whole = any(is_dtensor(part.stats.kl) for part in parts)
        ranks = _ranks_of_step(group, own, are_whole)
        # A rank of several may have had no sequence.
        if ranks is None and not parts:
            raise RuntimeError(
                "step() must come after a call of the KLPenalty, got none since the last step()"
            )
        counted = parts if ranks is None else [part.counted_on(ranks) for part in parts]
        # where the collectives are, so that the statistics do not travel to the host and back
        stats = _merged(counted, torch.device("cpu") if ranks is None else ranks.device)
        whole = stats if ranks is None else stats.all_reduce(ranks.group)
        steering, controller = whole if own is None else stats, self.controller
        if isinstance(controller, CoefficientController):  # it takes statistics of any device
            controller.update(steering)
            coef = controller._state["value"]  # a value on a GPU would take a second transfer
        else:
            device = getattr(controller, "device", None) or steering.kl.device
            controller.update(_moved(steering, device))
            coef = controller.value
        # Only now, so that an error of the update loses no statistics.
        self._pending = self._pending.without(len(parts))
        logged = {**whole.as_dict(), "kl/coef": coef}
        if (skipped := getattr(controller, "skipped", None)) is not None:
            logged["kl/skipped"] = skipped
        # A number is a constant, such as Dr. GRPO's, and may have any value. A count is a tensor.
        if isinstance(self._normalizer, Tensor):
            logged |= {"tokens": whole.length.sum(), "normalizer": self._normalizer}
        # One transfer for all of them.
        numbers = floats(logged)
        self._normalizer = None
        if "normalizer" in numbers:
            self._check_normalizer(numbers.pop("tokens"), numbers.pop("normalizer"))
        return numbers

    def _check_normalizer(self, tokens: float, normalizer: float) -> None:
        """Warn once about a denominator that no reduction of the step's batch has."""
        # The count of tokens may have been rounded to fp32 on its way.
        within = normalizer <= tokens * (1 + torch.finfo(torch.float32).eps)
        # data_parallel_normalizer has 1 for a batch without tokens.
        if within or tokens == 0 or self._warned_of_normalizer:
            return
        self._warned_of_normalizer = True
        warn_caller(
            "normalizer must be the number of tokens or sequences of the whole batch, over all "
            f"ranks divided by their number, got {normalizer:.6g} in a step of {tokens:.6g} "
            "tokens: the penalty is smaller than its coefficient says, as it should be for a "
            "constant, and for a count from before rejection"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state, and the statistics since the last step.

        The state is plain JSON, without settings. The statistics are this rank's own. After
        ``step`` there are none, and all ranks have the same state. If states share a name,
        ``torch.distributed.checkpoint`` keeps only one rank's. So between steps, give every rank
        its own name. This waits for the device.
        """
        frame = {"kind": "penalty", "version": STATE_VERSION}
        controller, pending = self.controller.state_dict(), _state_of(self._pending.parts())
        return {**frame, "controller": controller, "pending": pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore exactly what ``state_dict`` returned. This object keeps its settings.

        Raises:
            TypeError: ``state`` is not a dict, or an entry has the wrong type.
            ValueError: ``state`` has another kind or version, lacks a key, has an unknown key, or
                an entry is out of its range. The object is then unchanged.
        """
        check_state(state, "penalty", ["controller", "pending"])
        # Checked before the controller loads, so that an error leaves the object unchanged.
        restored = _parts_of("state['pending']", state["pending"])
        self.controller.load_state_dict(state["controller"])
        self._pending = _PendingStats(restored)

    def __getstate__(self) -> dict[str, Any]:
        # The chain of a compiled loop is pickled as one list.
        return {**vars(self), "_pending": self._pending.parts()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _pending=_PendingStats(state["_pending"]))

    def __repr__(self) -> str:
        settings = f"{self.estimator!r}, {self.reduction!r}, controller={self.controller!r}"
        return f"KLPenalty({settings}, calls={len(self._pending.parts())})"


def _ranks_of_step(group: Any, own: Any, are_whole: bool) -> Ranks | None:
    """The ranks of a step, None for this process alone; ``own`` is the controller's group."""
    # The controller adds up over its own group, and the logged numbers must be of the same ranks.
    if group is not None and own is not None and group != own:
        raise ValueError(f"group must be the controller's process_group, {own}, got {group}")
    group = own if group is None else group
    if not are_whole:
        return ranks_of(group)
    if group is not None:
        raise ValueError(
            "group and the controller's process_group must be None for statistics of DTensors, "
            "which hold all sequences on every rank, got a group"
        )
    return None


def _controller(given: object) -> KLController:
    if isinstance(given, KLController) and not isinstance(given, (type, GroupedKLController)):
        return given
    if given is None:
        return FixedKLController(1.0)
    # bool is a Real, and no coefficient.
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(
            "controller must be a controller with one coefficient (value, update, state_dict, "
            f"load_state_dict), a number or None, got {shown(given)}"
        )
    return FixedKLController(check_number("controller", given, least=0))


class _Part(NamedTuple):
    """The statistics of a call, and the ranks that shared its vocabulary, if any did."""

    stats: KLStats
    sharers: tuple[int, ...] = ()

    def counted_on(self, ranks: Ranks) -> _Part:
        """This part, without its sequences if an earlier rank of the step counts them."""
        of_step = [rank for rank in members_of(ranks.group) if rank in self.sharers]
        if not of_step or of_step[0] == torch.distributed.get_rank():
            return self
        # Empty and not left out: every rank must take part in the collectives.
        return self._replace(stats=KLStats(*(field[:0] for field in self.stats)))


class _PendingStats:
    """Statistics of calls: a list to which any thread may append, and the parts before it."""

    # torch.compile guards the lengths of lists and reads tuples, so every micro-batch would
    # recompile a call. It guards only the class of an object, so a compiled call makes an object.
    # In other calls, appending to the list ``newest`` and taking from it is atomic.
    def __init__(self, newest: list[_Part], before: _PendingStats | None = None) -> None:
        self.newest, self._before = newest, before

    def parts(self) -> list[_Part]:
        """All statistics, in their order."""
        lists: list[list[_Part]] = []
        node: _PendingStats | None = self
        while node is not None:
            lists.append(node.newest[:])
            node = node._before
        return [part for newest in reversed(lists) for part in newest]

    def without(self, count: int) -> _PendingStats:
        """These statistics without the first ``count`` parts."""
        # A compiled call has made objects, which are now joined to one list again.
        if self._before is not None:
            return _PendingStats(self.parts()[count:])
        del self.newest[:count]
        return self


def _merged(parts: list[_Part], where: torch.device) -> KLStats:
    """The statistics of all sequences on one device; another device's take one transfer."""
    stats = [gathered(part.stats) for part in parts]
    if not stats:
        # A rank without sequences has statistics of none.
        return KLStats(*torch.zeros(len(KLStats._fields), 0, device=where))
    if len({part.kl.device for part in stats}) > 1:
        stats = [_moved(part, where) for part in stats]
    return _moved(KLStats.cat(stats), where)


def _state_of(parts: list[_Part]) -> list[Any]:
    """Statistics as plain JSON: the dtype and the numbers of each field; [] without statistics.

    If ranks shared a vocabulary, a list of the calls' numbers of sequences and ranks follows.
    """
    # No dict and no tensor, because ``torch.distributed.checkpoint`` stores such a list under one
    # key. This waits for the device.
    if not parts:
        return []
    stats = _merged(parts, torch.device("cpu"))
    # The dtype goes with the numbers, because a resumed run must continue bit for bit.
    dtype = next(name for name, dtype in _DTYPES.items() if dtype == stats.kl.dtype)
    state: list[Any] = [dtype, *([*map(json_of, field.tolist())] for field in stats)]
    # Most runs share no vocabulary, and their states need no list of ranks.
    if any(part.sharers for part in parts):
        state.append([[part.stats.kl.numel(), *part.sharers] for part in parts])
    return state


def _parts_of(argument: str, state: object) -> list[_Part]:
    """The statistics from ``_state_of``, after ``_merged``; errors name ``argument``."""
    if not isinstance(state, list):
        raise TypeError(f"{argument} must be a list, got {type(state).__name__}")
    if not state:
        return []
    dtype, *fields = state
    check_choice(f"{argument}[0]", dtype, _DTYPES)
    width = len(KLStats._fields)
    calls = fields.pop() if len(fields) == width + 1 else None
    rows = [numbers_of(f"{argument}[{at}]", field) for at, field in enumerate(fields, 1)]
    lengths = [len(row) for row in rows]
    if len(rows) != width or len({*lengths}) > 1:
        raise ValueError(
            f"{argument} must hold a dtype and {width} lists of one length, got lists of {lengths}"
        )
    stats = torch.tensor(rows, dtype=_DTYPES[dtype])
    if calls is None:
        return [_Part(KLStats(*stats.unbind(0)))]
    counts = [[*map(int, numbers_of(f"{argument}[{width + 1}]", call, ()))] for call in calls]
    sizes = [sum(count[:1]) for count in counts]  # a list may be empty
    if sum(sizes) != lengths[0] or min(sizes, default=0) < 0:
        raise ValueError(
            f"{argument}[{width + 1}] must have the calls of {lengths[0]} sequences, got {calls}"
        )
    split = zip(torch.split(stats, sizes, 1), counts, strict=True)
    return [_Part(KLStats(*part.unbind(0)), tuple(sharers)) for part, (_, *sharers) in split]


def _moved(stats: KLStats, device: torch.device) -> KLStats:
    if stats.kl.device == device:
        return stats
    # One transfer for all fields.
    return KLStats(*torch.stack(stats).to(device).unbind(0))
