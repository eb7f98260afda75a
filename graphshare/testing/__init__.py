"""For writers of engines: is my state owner safe to capture?

:func:`check_owner` runs an owner through what a captured state must satisfy and returns a
:class:`Report`; :func:`assert_owner_conforms` is the same in one line of a test. Neither needs a
GPU, a pool or a capture. The pytest fixture is in ``graphshare.testing.pytest_plugin``, Hypothesis
strategies are in ``graphshare.testing.strategies``; only those two need what they are named after.
"""

from graphshare.testing.catalogue import CHECKS as CHECKS
from graphshare.testing.catalogue import Check as Check
from graphshare.testing.conformance import OwnerDoesNotConform as OwnerDoesNotConform
from graphshare.testing.conformance import assert_owner_conforms as assert_owner_conforms
from graphshare.testing.conformance import check_owner as check_owner
from graphshare.testing.report import Fact as Fact
from graphshare.testing.report import Rejection as Rejection
from graphshare.testing.report import Report as Report

__all__ = [
    "CHECKS",
    "Check",
    "Fact",
    "OwnerDoesNotConform",
    "Rejection",
    "Report",
    "assert_owner_conforms",
    "check_owner",
]
