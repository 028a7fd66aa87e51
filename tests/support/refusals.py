"""Checks of errors. A refused call must not change its tensors."""

import pytest
import torch
from agreement import same_bits

FLOATS = "torch.float64, torch.float32, torch.bfloat16, torch.float16"
"""The dtypes in the words of messages."""

# Requirements on an argument, in the words of messages.
POSITIVE = "must be a finite number > 0"
NOT_NEGATIVE = "must be a finite number >= 0"
GOOD_WEIGHTS = "must hold finite weights >= 0"
A_TENSOR = "must be a torch.Tensor"
ONE_OF_THE_DTYPES = "must have one of the dtypes"


def cases(of_type, of_value):
    both = [(of_type, TypeError), (of_value, ValueError)]
    return [
        pytest.param(arguments, error, message, id=name)
        for table, error in both
        for name, (arguments, message) in table.items()
    ]


def assert_refused(function, arguments, error, message):
    tensors = [
        argument
        for argument in arguments.values()
        if isinstance(argument, torch.Tensor)
        and argument.layout == torch.strided
        and not argument.is_meta
        and not argument.is_nested
    ]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(error, match=message) as caught:
        function(**arguments)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert all(same_bits(a, b) for a, b in zip(tensors, before, strict=True))
