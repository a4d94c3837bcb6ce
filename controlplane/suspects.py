"""Requests that may kill workers: found by what was lost, run alone, and only then failed.

A loss counts against a request only if it had a row in an unanswered plan and has got no token since
it was admitted last: what was fine before is not the cause. From the second count on it is a
*suspect*, and runs alone until it gets a token. One that is lost again while it is alone is the cause.
"""

import logging

from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sequence import SequenceGroup

log = logging.getLogger(__name__)


def count_loss(scheduler: Scheduler) -> SequenceGroup | None:
    """Notes that the plans in flight were lost with a worker, before the groups are taken away.

    Returns:
        The group that is the cause beyond doubt, if any; it must not run again.
    """
    lost = scheduler.groups_in_flight()
    for group in lost:
        if scheduler.has_progressed(group):
            continue
        if group.is_suspect and len(lost) == 1:
            return group
        group.losses += 1
        if group.is_suspect:
            group.is_single = False  # it is admitted by itself
            log.warning(
                "request %d of gateway %x was lost %d times without progress: it will run alone",
                group.id.request,
                group.id.gateway,
                group.losses,
            )
    return None
