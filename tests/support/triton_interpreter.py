"""A pytest plugin for a process of its own, where Triton's interpreter runs kernels on the CPU.

``TRITON_INTERPRET=1 pytest -p triton_interpreter``. It mends two things. The interpreter patches
``triton.language`` again with every call of a function, which takes nine tenths of its time: here
it is patched once. And it cuts fp32 off to bf16, where hardware rounds.
"""

import numpy
import torch
from triton.runtime import interpreter

_patch, _scopes = interpreter._patch_lang, {}
_truncate = interpreter.InterpreterBuilder.create_fp_trunc


def _patch_once(function):
    module = function.__globals__["__name__"]
    if module not in _scopes:
        _scopes[module] = _patch(function)
        _scopes[module].restore = lambda: None
    return _scopes[module]


def _round(self, source, to):
    if to.scalar != interpreter.tl.bfloat16:
        return _truncate(self, source, to)
    rounded = torch.from_numpy(source.data).bfloat16().view(torch.int16).numpy()
    return interpreter.TensorHandle(rounded.view(numpy.uint16), to.scalar)


interpreter._patch_lang = _patch_once
interpreter.InterpreterBuilder.create_fp_trunc = _round
numpy.seterr(all="ignore")  # overflow and NaN are the kernels' business, as on a GPU
