"""Requests come in here: checked against limits, queued, cancelled, forgotten."""

import itertools
from collections.abc import Callable

from octavo.controlplane.gateways import Gateway, Gateways
from octavo.controlplane.options import ControlPlaneOptions
from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sequence import OrderedGroups, SequenceGroup, State
from octavo.proto.plan import EARLY_STOPPING
from octavo.proto.session import Cancel, Submit


class Refusal(Exception):  # noqa: N818 (an answer to the client)
    """A request that is not taken: a gRPC status code and a text naming field and limit."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Reception:
    """Owns the queue of waiting groups and who submitted what."""

    def __init__(
        self,
        options: ControlPlaneOptions,
        scheduler_of: Callable[[SequenceGroup], Scheduler | None],
    ) -> None:
        """
        Args:
            scheduler_of: who has a group; None for one that waits for any gang.
        """
        self._options, self._scheduler_of = options, scheduler_of
        self.waiting = OrderedGroups()
        self.gateways = Gateways(options.lease)
        self._serials = itertools.count()

    def submit(self, gateway: Gateway, submit: Submit, scheduler: Scheduler | None) -> None:
        """Queues a request; a known attempt is ignored, a higher one replaces the lower.

        Args:
            scheduler: of the gang that can hold most; None where there was never any.

        Raises:
            Refusal: it is malformed, could never run, or the queue is full.
        """
        old = gateway.groups.get(submit.request)
        if old is not None and old.attempt >= submit.attempt:
            return
        if old is not None:
            self.cancel_group(old, set())
        self._check(submit)
        group = SequenceGroup.from_submit(submit, next(self._serials))
        reason = scheduler.fit(group) if scheduler is not None else None
        if reason is not None:
            raise Refusal("INVALID_ARGUMENT", reason)
        gateway.groups[submit.request] = group
        self.waiting.add(group)

    def _check(self, submit: Submit) -> None:
        options = self._options
        if not len(submit.prompt) or submit.prompt.min() < 0:
            raise Refusal("INVALID_ARGUMENT", "prompt: empty, or a token id is negative")
        if not submit.samples or all(state.finish for state in submit.samples):
            raise Refusal("INVALID_ARGUMENT", "n: no sample is left to generate")
        if submit.max_tokens < 0:
            raise Refusal("INVALID_ARGUMENT", "max_tokens: below 0")
        if len(submit.sampling.bias_ids) != len(submit.sampling.bias_values):
            raise Refusal("INVALID_ARGUMENT", "logit_bias: ids and values differ in number")
        if submit.beams is not None and submit.beams.early_stopping not in EARLY_STOPPING:
            raise Refusal("INVALID_ARGUMENT", "early_stopping: not one of " + ", ".join(EARLY_STOPPING))
        if any(len(s.tokens) >= max(submit.max_tokens, 1) and not s.finish for s in submit.samples):
            raise Refusal("INVALID_ARGUMENT", "samples: more outputs than max_tokens")
        if len(self.waiting) >= options.max_waiting_requests:
            raise Refusal(
                "RESOURCE_EXHAUSTED",
                f"the queue is full: {options.max_waiting_requests} requests wait; retry later",
            )
        if self.waiting.tokens + len(submit.prompt) > options.max_waiting_tokens:
            raise Refusal(
                "RESOURCE_EXHAUSTED",
                f"the queue is full: {options.max_waiting_tokens} prompt tokens wait; retry later",
            )

    def cancel(self, gateway: Gateway, cancel: Cancel) -> None:
        """Stops samples of a request. Unknown requests and old attempts are ignored."""
        group = gateway.groups.get(cancel.request)
        if group is not None and group.attempt <= cancel.attempt:
            self.cancel_group(group, set(cancel.samples.tolist()))

    def cancel_group(self, group: SequenceGroup, samples: set[int]) -> None:
        """Stops these samples of a group, or all if there are none."""
        scheduler = self._scheduler_of(group)
        if scheduler is not None:
            scheduler.cancel(group, samples)
            return
        if group.state is not State.WAITING:
            return
        for sequence in group.live:
            if not samples or sequence.sample in samples or group.search is not None:
                sequence.finished = True
        if not group.live:
            self.waiting.remove(group)
            group.state = State.FINISHED
            self.gateways.forget(group.id, group)

    def drop_gateway(self, gateway: Gateway) -> None:
        """Frees everything that a gateway has submitted."""
        for group in list(gateway.groups.values()):
            self.cancel_group(group, set())
        self.gateways.remove(gateway)
