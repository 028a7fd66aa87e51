"""The protocol of a controller, and a coefficient for each group of the data."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from klfast.args.checks import check_number
from klfast.args.keywords import explains_keywords
from klfast.controllers.base import STATE_VERSION, CoefficientController, check_state
from klfast.controllers.inputs import GIVEN, KLName, chosen_kl
from klfast.controllers.target import FixedKLController
from klfast.distributed.ranks import Ranks, check_same
from klfast.stats.kl import KLStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@runtime_checkable
class KLController(Protocol):
    """A controller with one coefficient: any object with these four members.

    It is taken as ``controller`` of :class:`klfast.KLPenalty` and :class:`klfast.KLLog`, as
    ``coef`` of :func:`klfast.kl_penalty`, :func:`klfast.kl_divergence` and :func:`klfast.reduce`,
    and as ``kl_coef`` of :func:`klfast.kl_rewards`. :class:`klfast.GroupedKLController` takes a
    class of them, and makes its objects as ``controller(init_kl_coef, target, **options)``. ::

        class Halving:
            def __init__(self, init_kl_coef, target):
                self.value, self.target = init_kl_coef, target

            def update(self, current):  # the batch's KLStats
                kl = current.token_mean().item()
                self.value *= 0.5 if kl < self.target else 1.0

            def state_dict(self):
                return {"value": self.value}

            def load_state_dict(self, state):
                self.value = state["value"]

    klfast uses further members if the object has them. ``skipped`` is logged. Statistics are moved
    to ``device``. ``unit`` is compared with ``KLPenalty``'s. A controller with a ``process_group``
    adds up the ranks' KL itself. To other controllers ``KLPenalty.step`` gives the statistics of
    all ranks.

    Units: the statistics are in nats per sequence; the coefficient has no unit.

    Source: klfast's own.
    """

    @property
    def value(self) -> Any:
        """The coefficient, a number, or a 0-dim tensor that is updated in place."""

    def update(self, current: Any, /) -> Any:
        """Move the coefficient after a batch; ``current`` is its ``KLStats`` or mean KL in nats."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the ``state`` that ``state_dict`` returned."""


class GroupedKLController:
    """A controller per group of the data (a task, a language, a bucket of lengths).

    Each group has its own coefficient, target and memory, under one rule and one set of options.

    Args:
        controller: the class that steers: klfast's, such as ``klfast.NuPIKLController``, or one
            whose objects are a :class:`klfast.KLController`, made as ``controller(init_kl_coef,
            target, **options)``.
        init_kl_coef: the first coefficient, of all groups or by group.
        targets: the KL to hold by group, > 0, in nats per ``unit``; at least one.
        process_group: the ranks that measure together, under klfast's controllers alone; None for
            this process alone. One all-reduce per ``update`` serves all groups.
        **options: of ``controller``, for all groups.

    Attributes:
        groups: the controllers by group.

    Raises:
        TypeError: a setting is of the wrong type, or an option is unknown to ``controller``.
        ValueError: a setting is out of its range, or ``init_kl_coef`` has other groups.
    """

    @explains_keywords
    def __init__(
        self,
        controller: Callable[..., KLController],
        init_kl_coef: float | Mapping[str, float],
        targets: Mapping[str, float],
        *,
        process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        given: Any = controller
        # A fixed coefficient takes no target.
        is_fixed = isinstance(given, type) and issubclass(given, FixedKLController)
        if is_fixed or not callable(given):
            raise TypeError(
                f"controller must be the class of a controller with a target, got {controller!r}"
            )
        if not isinstance(targets, Mapping):
            raise TypeError(f"targets must map groups to numbers, got {type(targets).__name__}")
        if not targets:
            raise ValueError("targets must have at least one group, got none")
        for name, target in targets.items():
            if not isinstance(name, str):
                raise TypeError(f"targets must have strings as keys, got {name!r}")
            check_number(f"targets[{name!r}]", target, above=0)
        coefs = self._by_group("init_kl_coef", init_kl_coef, targets)
        self.groups: dict[str, Any] = {
            name: controller(coefs[name], target, **options) for name, target in targets.items()
        }
        # The groups' controllers have no group of their own: one all-reduce serves them all.
        self._ranks = None if process_group is None else Ranks(process_group)
        # Once is enough, because the groups never change.
        self._are_groups_compared = False
        for name, part in self.groups.items():
            if isinstance(part, CoefficientController):
                part._name += f" of {name!r}"  # in its warnings, which one rank alone gives
                part._is_mute = self._ranks is not None and self._ranks.rank != 0
            elif not isinstance(part, KLController):
                raise TypeError(
                    "controller must make objects with value, update, state_dict and "
                    f"load_state_dict, got {type(part).__name__}"
                )
            elif self._ranks is not None:
                raise TypeError(
                    "process_group must be None for a controller that is not klfast's, got one for "
                    f"{type(part).__name__}"
                )

    @staticmethod
    def _by_group(argument: str, given: Any, groups: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            return dict.fromkeys(groups, given)
        if given.keys() != groups.keys():
            raise ValueError(f"{argument} must have the groups {[*groups]}, got {[*given]}")
        return given

    @property
    def value(self) -> dict[str, Any]:
        """The coefficients by group, floats, or with ``device=`` 0-dim tensors updated in place."""
        return {name: part.value for name, part in self.groups.items()}

    @property
    def skipped(self) -> dict[str, Any]:
        """How many KLs were not finite, by group."""
        return {name: getattr(part, "skipped", 0) for name, part in self.groups.items()}

    def update(
        self,
        current: Mapping[str, float | Tensor | KLStats],
        n_steps: Mapping[str, int] | int | None = None,
        *,
        kl: KLName = "kl",
    ) -> dict[str, Any]:
        """Move the coefficients of the groups that a batch has, and return ``value``.

        Args:
            current: the mean KL in nats by group, as of the controller's ``update``. With
                ``process_group=`` every rank calls, with the groups that it has, even none.
            n_steps: the number of sequences, of each group in ``current`` or by group.
            kl: which sums of the ``KLStats`` steer, as of the controller's ``update``, whose
                warnings name the group.

        Raises:
            TypeError: ``current`` is not a mapping, or as the controller's ``update``.
            ValueError: a group has no target, or as the controller's ``update``.
            RuntimeError: on every rank, the ranks have different groups, which the first update
                looks at, or different coefficients; or a rank has died.
        """
        if not isinstance(current, Mapping):
            raise TypeError(f"current must map groups to KLs, got {type(current).__name__}")
        unknown = [name for name in current if name not in self.groups]
        if unknown:
            raise ValueError(f"current must have groups among {[*self.groups]}, got {unknown[0]!r}")
        sequences = self._by_group("n_steps", n_steps, current)
        # All are checked before one moves, so that an error leaves every group as it is.
        checked: dict[str, tuple[Any, Any]] = {}
        for name, given in current.items():
            part = self.groups[name]
            if isinstance(part, CoefficientController):
                checked[name] = part._checked(given, sequences[name], kl, self._ranks)
            else:
                checked[name] = chosen_kl(given, kl, self._ranks), sequences[name]
        if self._ranks is None:
            for name, (kl_of_group, count) in checked.items():
                self.groups[name].update(kl_of_group, *(() if count is None else (count,)))
            return self.value
        if not self._are_groups_compared:
            # A table whose size differs between ranks ends the process under gloo, and hangs under
            # NCCL: the ranks must have the same groups, in one order.
            names = [*self.groups]
            own = [len(names), zlib.crc32(json.dumps(names).encode())]
            given = self._ranks.gather(torch.tensor(own, device=self._ranks.device))
            counts, checksums = given.T.tolist()
            check_same("the number of groups in targets", counts)
            check_same("the checksum of the groups in targets", checksums)
            self._are_groups_compared = True
        rows = []
        for name, part in self.groups.items():
            rows.append(part._row(*checked.get(name, (0.0, 0)), self._ranks))
            # Every rank sends a row for every group, as the tables must have one shape.
            rows[-1][GIVEN] = float(name in checked)
        table = self._ranks.gather(torch.stack(rows))
        for at, part in enumerate(self.groups.values()):
            part._update_of_ranks(table[:, at])
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return every group's state, as plain JSON; no settings."""
        groups = {name: part.state_dict() for name, part in self.groups.items()}
        return {"kind": "grouped", "version": STATE_VERSION, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore exactly the state that ``state_dict`` returned. This object keeps its settings.

        Raises:
            TypeError, ValueError: as a controller's ``load_state_dict``, or ``state`` has other
                groups. The object is then unchanged.
        """
        check_state(state, "grouped", ["groups"])
        groups = state["groups"]
        if not isinstance(groups, dict):
            raise TypeError(f"state['groups'] must be a dict, got {type(groups).__name__}")
        if groups.keys() != self.groups.keys():
            raise ValueError(f"state must have the groups {[*self.groups]}, got {[*groups]}")
        for name, part in self.groups.items():
            # Copies load first, so that a bad state of one group leaves all groups as they are.
            copy.copy(part).load_state_dict(groups[name])
        for name, part in self.groups.items():
            part.load_state_dict(groups[name])

    def __copy__(self) -> GroupedKLController:
        """A copy goes on by itself: an update of one changes nothing in the other."""
        other = type(self).__new__(type(self))
        own = {name: copy.copy(part) for name, part in self.groups.items()}
        vars(other).update({**vars(self), "groups": own})
        return other

    def __repr__(self) -> str:
        parts = ", ".join(f"{name!r}: {part!r}" for name, part in self.groups.items())
        return f"{type(self).__name__}({{{parts}}})"
