"""Helpers of the tests that need a GPU."""

import contextlib
import os
import time
import warnings

import pytest
import torch
from agreement import INTEGERS, same_bits

from klfast import backends

marks = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BACKENDS = ("native", "triton")

SMALL = 1 << 20  # bytes that a call may allocate besides its outputs, for inputs of any size

LARGE_MEMORY = 48 << 30


def needed_backend(name):
    """The name of a backend that is to serve a GPU."""
    reason = backends.BACKENDS[name].why_not(torch.device("cuda"))
    if reason is not None:
        refuse = pytest.fail if os.environ.get("KLFAST_REQUIRE_CUDA") == "1" else pytest.skip
        refuse(f"backend {name}: {reason}")
    return name


@pytest.fixture(params=BACKENDS)
def backend(request):
    """The name of every backend that must serve a GPU."""
    return needed_backend(request.param)


@pytest.fixture(autouse=True)
def memory_given_back():
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def needs_large_memory():
    memory = torch.cuda.get_device_properties(0).total_memory
    if memory < LARGE_MEMORY:
        pytest.skip(f"needs {LARGE_MEMORY >> 30} GiB of device memory, there are {memory >> 30}")


def assert_same_bits(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert same_bits(one, other)


def different_bits(outputs, expected):
    """The number of entries that differ, on the device."""
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    for one, other in zip(outputs, expected, strict=True):
        integer = INTEGERS[one.element_size()]
        total += (one.contiguous().view(integer) != other.contiguous().view(integer)).sum()
    return total


def capture(call, stream=None):
    """(graph of one call, its outputs)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = call()
    return graph, outputs


def overwrite(inputs, others):
    for tensor, other in zip(inputs, others, strict=True):
        if tensor is not None:
            tensor.copy_(other)


def assert_replays(inputs, others, call):
    """A graph of a call gives the bits of eager calls on new inputs.

    The tenth replay does too, because counters reset themselves.
    """
    graph, outputs = capture(call)
    for _ in range(3):
        overwrite(inputs, others())
        graph.replay()
        replayed = [output.clone() for output in outputs]
        assert_same_bits(replayed, call())
        for _ in range(10):
            graph.replay()
            assert_same_bits(outputs, replayed)
    return replayed


def assert_streams_apart(calls, times):
    """Two streams at once do not disturb each other."""
    streams = [torch.cuda.Stream() for _ in calls]
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    wrong = []
    for _ in range(times):
        for stream, call, want in zip(streams, calls, expected, strict=True):
            with torch.cuda.stream(stream):
                wrong.append(different_bits(call(), want))
    torch.cuda.synchronize()
    assert torch.stack(wrong).tolist() == [0] * times * len(calls)


@contextlib.contextmanager
def no_sync():
    """Code that waits for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_no_sync(call):
    """A call waits for nothing, and has the same bits."""
    expected = call()
    with no_sync():
        different = different_bits(call(), expected)
    assert different.item() == 0


def assert_peak(call, outputs):
    """A call holds little more than the bytes of its outputs, and frees them with its results."""
    call()  # allocates everything that is made once
    torch.cuda.synchronize()
    before = requested_bytes("current")
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    assert requested_bytes("peak") - before <= outputs + SMALL
    del kept
    for _ in range(100):  # the backward's thread may let go of its tensors a little later
        if requested_bytes("current") - before <= SMALL:
            return
        time.sleep(0.01)
    raise AssertionError(f"{requested_bytes('current') - before} bytes are held")


def requested_bytes(which):
    """The sizes of all tensors. The allocator counts blocks, which may be 1 MiB larger."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
