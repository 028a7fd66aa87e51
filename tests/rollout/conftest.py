"""The backends that serve ``rollout_correction``. Triton has no kernels for it."""

import pytest
from targets import OF_ROLLOUT, serving


@pytest.fixture(params=OF_ROLLOUT)
def backend(request):
    """The name of a backend, for every backend and device that serves ``rollout_correction``."""
    target = OF_ROLLOUT[request.param]
    with serving(target):
        yield target.backend
