"""Bad hidden states or heads give one error that names the argument, before any matmul."""

import pytest
import torch
from refusals import FLOATS, assert_refused, cases

import klfast
from klfast.autograd import chunks

GOOD = {
    "hidden": torch.ones(2, 3, 4),
    "weight": torch.ones(5, 4),
    "ref_hidden": torch.ones(2, 3, 6),
    "ref_weight": torch.ones(5, 6),
}
IDS = torch.zeros(2, 3, dtype=torch.int64)

TYPES = {
    "packed": (
        {"weight": torch.zeros(10, 1, dtype=torch.uint8)},
        f"weight must have one of the dtypes {FLOATS}, got torch.uint8: dequantize a quantized",
    ),
    "module": (
        {"weight": torch.nn.Linear(4, 5)},
        "weight must be a torch.Tensor, got the module Linear: pass head.weight",
    ),
}
VALUES = {
    "width": (
        {"weight": torch.ones(5, 3)},
        r"weight must have shape \[V, 4\], V >= 1, to fit the hidden size of hidden, got \[5, 3\]",
    ),
    "not gathered": (
        {"weight": torch.ones(0)},
        r"weight must have shape .* got \[0\]: DeepSpeed ZeRO-3 empties parameters outside",
    ),
    "bias not gathered": (
        {"bias": torch.ones(0)},
        r"bias must have .* got \[0\]: DeepSpeed ZeRO-3",
    ),
    "transposed": ({"weight": torch.ones(4, 5)}, r"weight must .* got \[4, 5\]: pass weight.T"),
    "softcap beyond fp32": ({"softcap": 1e39}, r"softcap must be a number > 0 within fp32, got 1e"),
    "ids": (
        {"token_ids": IDS[:, :2]},
        r"token_ids must have the shape of hidden without the hidden size, \[2, 3\], or K ids per",
    ),
    "word": (
        {"token_ids": IDS + 5},
        r"token_ids must be in \[0, 5\) where tokens are kept, got 5.* pass group= ",
    ),
    "temperature's shape": (
        {"temperature": torch.ones(3)},
        r"have the first dimensions of hidden without the hidden size, \[2, 3\]",
    ),
}
OF_DIVERGENCE = {
    "tokens": (
        {"ref_hidden": torch.ones(2, 4, 6)},
        r"ref_hidden must have shape \[2, 3, D_ref\], with the tokens of hidden, got \[2, 4, 6\]",
    ),
    "words": (
        {"ref_weight": torch.ones(7, 6)},
        r"ref_weight must have the vocabulary size of weight, 5, got \[7, 6\]: slice both to "
        r"the common vocabulary, weight\[:5\]$",
    ),
    "no reference head": (
        {"ref_weight": None},
        "ref_weight must be given if ref_hidden has another hidden size than hidden, 4, got",
    ),
    "a mask as a head": (
        {"ref_weight": torch.ones(2, 3, dtype=torch.bool)},
        r"ref_weight must be the reference's head, \[V, 6\], got \[2, 3\], .*: pass a mask as",
    ),
    "weights as a head": ({"ref_weight": torch.ones(2, 3)}, "ref_weight .*: pass a mask as mask=$"),
    "softcaps": ({"softcap": (1.0, 2.0, 3.0)}, r"softcap must be a number > 0, None, or \(the"),
}


@pytest.fixture
def no_product(monkeypatch):
    """A matmul fails the test, because arguments are refused before."""

    def made(*_):
        raise AssertionError("a product was made")

    monkeypatch.setattr(chunks, "_is_wide_product", made)


@pytest.mark.usefixtures("no_product")
@pytest.mark.parametrize(("arguments", "error", "message"), cases(TYPES, VALUES | OF_DIVERGENCE))
def test_of_divergences(arguments, error, message):
    given = GOOD | arguments
    assert_refused(klfast.linear_kl_divergence, given, error, message)


@pytest.mark.usefixtures("no_product")
@pytest.mark.parametrize(("arguments", "error", "message"), cases(TYPES, VALUES))
def test_of_log_probs(arguments, error, message):
    given = {"hidden": GOOD["hidden"], "weight": GOOD["weight"], "token_ids": IDS} | arguments
    assert_refused(klfast.linear_token_logprobs, given, error, message)


def test_one_model_has_one_softcap():
    arguments = {"hidden": torch.ones(3, 4), "weight": torch.ones(5, 4), "token_ids": IDS[0]}
    assert_refused(
        klfast.linear_token_logprobs,
        arguments | {"softcap": (1.0, 2.0)},
        TypeError,
        r"softcap must be a number > 0 or None, got \(1.0, 2.0\)",
    )


def test_a_freed_weight_is_refused():
    weight = GOOD["weight"].clone()
    weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="weight must have memory, got a storage that was freed"):
        klfast.linear_kl_divergence(GOOD["hidden"], weight, GOOD["hidden"])


@pytest.mark.parametrize("frozen", [False, True])
def test_no_id_a_token_is_nothing(backend, frozen):
    here = torch.get_default_device()
    hidden = GOOD["hidden"].to(here).clone().requires_grad_()
    weight = GOOD["weight"].to(here).clone().requires_grad_(not frozen)
    none = torch.zeros(2, 3, 0, dtype=torch.int64)
    found = klfast.linear_token_logprobs(hidden, weight, none, backend=backend)
    assert found.shape == (2, 3, 0)
    found.sum().backward()
    assert not hidden.grad.any()
