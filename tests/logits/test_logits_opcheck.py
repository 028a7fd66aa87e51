"""The ops over logits as torch sees them: schemas, fakes, no crash whatever a direct call holds."""

import pytest
import torch
from agreement_logits import random_logits
from torch.library import opcheck

import klfast
from klfast.args.logits import NO_ID
from klfast.args.rows import DIVERGENCES, ENTROPIES

assert klfast.info()  # loads the extension
OPS = torch.ops.klfast
TOKENS = OPS.token_logprobs_fwd.default
TOKENS_BACKWARD = OPS.token_logprobs_bwd.default
TOKENS_BACKWARD_ = OPS.token_logprobs_bwd_.default
DIVERGENCE = OPS.kl_divergence_fwd.default
DIVERGENCE_BACKWARD = OPS.kl_divergence_bwd.default

KEEP = torch.tensor([True, False, True, True, False, True])
CASES = {
    "plain": (lambda: random_logits(2, 3, 7), None),
    "bf16-and-fp64": (
        lambda: random_logits(2, 3, 7, dtype=torch.bfloat16, ref_dtype=torch.float64),
        KEEP,
    ),
    "strided": (lambda: [t[..., ::2].transpose(0, 1) for t in random_logits(3, 2, 14)], KEEP),
}
EMPTY = {"no-sequences": (0, 3, 7), "no-tokens": (2, 0, 7)}

every_case = pytest.mark.parametrize(("make", "keep"), CASES.values(), ids=CASES)
every_empty = pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
wants = pytest.mark.parametrize("wants", [(True, False), (False, True), (True, True)], ids=str)


def ids_for(logits):
    rows = logits.shape[0] * logits.shape[1]
    return torch.arange(rows) % logits.shape[2]


def tokens_arguments(logits, keep=None, want_entropy=True):
    return {
        "logits": logits,
        "token_ids": ids_for(logits),
        "keep": keep,
        "temperature": 0.7,
        "want_entropy": want_entropy,
    }


def tokens_backward_arguments(logits, keep=None, with_entropy=True, **changes):
    forward = tokens_arguments(logits, keep, with_entropy)
    logprobs, entropy, lse = TOKENS(*forward.values())
    return {
        **{name: forward[name] for name in ("logits", "token_ids", "keep")},
        "lse": lse,
        "logprobs": logprobs,
        "entropy": entropy,
        "temperature": 0.7,
        "grad_logprobs": torch.rand_like(logprobs),
        "grad_entropy": torch.rand_like(entropy) if with_entropy else None,
        **changes,
    }


def divergence_inputs(
    logits, ref_logits, divergence="kl", with_ids=False, keep=None, entropy_of="none"
):
    return {
        "logits": logits,
        "ref_logits": ref_logits,
        "token_ids": ids_for(logits) if with_ids else None,
        "keep": keep,
        "divergence": DIVERGENCES.index(divergence),
        "jsd_beta": 0.3,
        "temperature": 0.7,
        "entropy_of": ENTROPIES.index(entropy_of),
    }


def divergence_arguments(logits, ref_logits, *options, wants=(False, False), **more):
    inputs = divergence_inputs(logits, ref_logits, *options, **more)
    dtype = torch.promote_types(torch.promote_types(logits.dtype, ref_logits.dtype), torch.float32)
    row_weights = torch.rand(logits.shape[0] * logits.shape[1], dtype=dtype) if any(wants) else None
    return {**inputs, "row_weights": row_weights, "want_grad": wants[0], "want_grad_ref": wants[1]}


def divergence_backward_arguments(logits, ref_logits, *options, wants=(True, True), **more):
    forward = divergence_arguments(logits, ref_logits, *options, **more)
    rows, logprobs, _, saved, _, _, entropy = DIVERGENCE(*forward.values())
    of_tokens = torch.rand_like(logprobs) if forward["token_ids"] is not None else None
    of_entropy = torch.rand_like(rows) if entropy.numel() > 0 else None
    inputs = list(forward.items())[:8]
    return {
        **dict(inputs),
        "rows": rows,
        "saved": saved,
        "entropy": entropy,
        "grad_rows": torch.rand_like(rows),
        "grad_logprobs": of_tokens,
        "grad_ref_logprobs": of_tokens,
        "grad_entropy": of_entropy,
        "want_grad": wants[0],
        "want_grad_ref": wants[1],
    }


@every_case
def test_ops_on_tokens_keep_their_contract_with_torch(make, keep):
    logits, _ = make()
    with_entropy = keep is not None
    opcheck(TOKENS, tuple(tokens_arguments(logits, keep, with_entropy).values()))
    backward = tokens_backward_arguments(logits, keep, with_entropy)
    opcheck(TOKENS_BACKWARD, tuple(backward.values()))
    backward["logits"] = logits.contiguous()
    opcheck(TOKENS_BACKWARD_, tuple(backward.values()))


@every_case
def test_ops_on_divergences_keep_their_contract_with_torch(make, keep):
    models = make()
    for divergence, entropy_of in (("kl", "none"), ("kl", "second"), ("jsd", "first")):
        options = {"divergence": divergence, "with_ids": keep is not None, "keep": keep}
        options["entropy_of"] = entropy_of
        opcheck(DIVERGENCE, tuple(divergence_arguments(*models, **options).values()))
        backward = divergence_backward_arguments(*models, **options)
        opcheck(DIVERGENCE_BACKWARD, tuple(backward.values()))


@wants
def test_the_gradients_that_are_asked_for_come(wants):
    models = random_logits(2, 3, 7)
    forward = divergence_arguments(*models, wants=wants)
    backward = divergence_backward_arguments(*models, wants=wants)
    opcheck(DIVERGENCE, tuple(forward.values()))
    opcheck(DIVERGENCE_BACKWARD, tuple(backward.values()))
    shapes = [grad.shape for grad in DIVERGENCE(*forward.values())[4:6]]
    assert shapes == [(2, 3, 7) if wanted else (0,) for wanted in wants]
    shapes = [grad is not None and grad.shape for grad in DIVERGENCE_BACKWARD(*backward.values())]
    assert shapes == [wanted and (2, 3, 7) for wanted in wants]


@pytest.mark.parametrize("shape", [(), (6,)], ids=["of-all", "of-rows"])
@every_case
def test_temperatures_in_tensors_keep_the_contract(make, keep, shape):
    models = make()
    inverse = (torch.rand(shape) + 0.5).double()
    forward = (*tokens_arguments(models[0], keep).values(), inverse)
    opcheck(TOKENS, forward)
    opcheck(TOKENS_BACKWARD, (*tokens_backward_arguments(models[0], keep).values(), inverse))
    opcheck(DIVERGENCE, (*divergence_arguments(*models, keep=keep).values(), inverse))
    backward = divergence_backward_arguments(*models, keep=keep)
    opcheck(DIVERGENCE_BACKWARD, (*backward.values(), inverse))


@pytest.mark.parametrize("count", [0, 1, 5])
@every_case
def test_several_ids_of_a_row_keep_the_contract(make, keep, count):
    logits, _ = make()
    ids = torch.randint(7, (6, count))
    ids[::2, ::2] = NO_ID
    forward = {**tokens_arguments(logits, keep), "token_ids": ids}
    opcheck(TOKENS, tuple(forward.values()))
    backward = tokens_backward_arguments(logits, keep, token_ids=ids)
    logprobs, entropy, saved = TOKENS(*forward.values())
    assert logprobs.shape == (6 * count,)
    own = {"lse": saved, "logprobs": logprobs, "entropy": entropy}
    backward |= {**own, "grad_logprobs": torch.rand_like(logprobs)}
    opcheck(TOKENS_BACKWARD, tuple(backward.values()))
    opcheck(TOKENS_BACKWARD_, tuple({**backward, "logits": logits.contiguous()}.values()))


@every_empty
def test_empty_batches_keep_the_contract(shape):
    models = random_logits(*shape)
    opcheck(TOKENS, tuple(tokens_arguments(models[0]).values()))
    opcheck(TOKENS_BACKWARD, tuple(tokens_backward_arguments(models[0]).values()))
    opcheck(TOKENS_BACKWARD_, tuple(tokens_backward_arguments(models[0]).values()))
    both = {"with_ids": True, "wants": (True, True)}
    opcheck(DIVERGENCE, tuple(divergence_arguments(*models, **both).values()))
    opcheck(DIVERGENCE_BACKWARD, tuple(divergence_backward_arguments(*models, **both).values()))


WRONG_LOGITS = {
    "2-dim": torch.zeros(6, 7),
    "4-dim": torch.zeros(1, 2, 3, 7),
    "no-words": torch.zeros(2, 3, 0),
    "integers": torch.zeros(2, 3, 7, dtype=torch.int64),
    "complex": torch.zeros(2, 3, 7, dtype=torch.complex64),
    "float8": torch.zeros(2, 3, 7).to(torch.float8_e4m3fn),
}
WRONG_ROWS = {
    "token_ids": [
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(6, dtype=torch.int32),
        torch.zeros(6),
        torch.zeros(12, dtype=torch.int64)[::2],
        torch.full((6,), 7),
        torch.full((6,), -1),
    ],
    "keep": [
        torch.ones(5, dtype=torch.bool),
        torch.ones(2, 3, dtype=torch.bool),
        torch.ones(6),
        torch.ones(12, dtype=torch.bool)[::2],
        torch.ones(1, dtype=torch.bool).expand(6),
    ],
    "temperature": [0.0, -1.0, float("nan")],
}
WRONG_IDS_OF_K = [
    torch.zeros(5, 2, dtype=torch.int64),
    torch.zeros(2, 6, dtype=torch.int64),
    torch.zeros(6, 2, 1, dtype=torch.int64),
    torch.zeros(6, 2, dtype=torch.int32),
    torch.zeros(6, 4, dtype=torch.int64)[:, ::2],
    torch.tensor([[0, 7]] * 6),
    torch.tensor([[0, -1]] * 6),
]
WRONG_INVERSE = [
    torch.ones(5, dtype=torch.float64),
    torch.ones(2, 3, dtype=torch.float64),
    torch.ones(12, dtype=torch.float64)[::2],
    torch.ones(6),
    torch.ones(()),
    torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64),
    torch.tensor(float("nan"), dtype=torch.float64),
    torch.tensor(-1.0, dtype=torch.float64),
]
PER_ROW = [
    torch.zeros(5),
    torch.zeros(2, 3),
    torch.zeros(6, dtype=torch.bfloat16),
    torch.zeros(12)[::2],
    torch.zeros(1).expand(6),
]
NOT_DOUBLE = [torch.zeros(6), torch.zeros(5, dtype=torch.float64)]
WRONG_SAVED = [
    torch.zeros(2, 6, dtype=torch.float64),
    torch.zeros(3, 5, dtype=torch.float64),
    torch.zeros(18, dtype=torch.float64),
    torch.zeros(3, 6),
    torch.zeros(6, 3, dtype=torch.float64).t(),
]


def assert_all_refused(op, good, wrong):
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(RuntimeError, match=r"."):
                op(*{**good, argument: value}.values())


def test_a_direct_call_on_tokens_with_a_wrong_argument_raises():
    good = tokens_arguments(torch.zeros(2, 3, 7))
    assert_all_refused(TOKENS, good, {"logits": WRONG_LOGITS.values(), **WRONG_ROWS})
    several = {"token_ids": WRONG_IDS_OF_K, "inverse_temperature": WRONG_INVERSE}
    assert_all_refused(TOKENS, {**good, "inverse_temperature": None}, several)
    good = tokens_backward_arguments(torch.zeros(2, 3, 7))
    wrong = {
        "logits": WRONG_LOGITS.values(),
        "token_ids": WRONG_ROWS["token_ids"][:-2],  # of another word there is no gradient
        "keep": WRONG_ROWS["keep"],
        "temperature": WRONG_ROWS["temperature"],
        "lse": NOT_DOUBLE,
        "logprobs": PER_ROW,
        "entropy": PER_ROW,
        "grad_logprobs": PER_ROW,
        "grad_entropy": PER_ROW,
    }
    assert_all_refused(TOKENS_BACKWARD, good, wrong)
    assert_all_refused(TOKENS_BACKWARD_, good, wrong)
    assert torch.equal(good["logits"], torch.zeros(2, 3, 7))
    strided = torch.zeros(3, 2, 7).transpose(0, 1)
    assert_all_refused(TOKENS_BACKWARD_, good, {"logits": [strided]})


def test_a_direct_call_on_divergences_with_a_wrong_argument_raises():
    logits = torch.zeros(2, 3, 7)
    wrong = {
        "logits": WRONG_LOGITS.values(),
        "ref_logits": [*WRONG_LOGITS.values(), torch.zeros(3, 2, 7), torch.zeros(2, 3, 6)],
        "divergence": [-1, len(DIVERGENCES)],
        "jsd_beta": [0.0, 1.0, -1.0, float("nan")],
        "entropy_of": [-1, len(ENTROPIES)],
        **WRONG_ROWS,
    }
    good = divergence_arguments(logits, logits + 1, with_ids=True, wants=(True, True))
    beside_gradients = [ENTROPIES.index("first")]
    refused = {**wrong, "row_weights": [None, *PER_ROW]}
    refused["entropy_of"] = [*wrong["entropy_of"], *beside_gradients]
    assert_all_refused(DIVERGENCE, good, refused)
    of_second = [ENTROPIES.index("second")]
    jsd = divergence_arguments(logits, logits + 1, "jsd")
    assert_all_refused(DIVERGENCE, jsd, {"entropy_of": of_second})
    good = divergence_backward_arguments(logits, logits + 1, with_ids=True, entropy_of="first")
    wrong["token_ids"] = wrong["token_ids"][:-2]
    wrong["entropy_of"] += [ENTROPIES.index("none")]
    assert_all_refused(DIVERGENCE_BACKWARD, good, {"entropy": [None]})
    of_rows = ("rows", "entropy", "grad_rows", "grad_logprobs", "grad_ref_logprobs", "grad_entropy")
    rows = dict.fromkeys(of_rows, PER_ROW)
    assert_all_refused(DIVERGENCE_BACKWARD, good, {**wrong, **rows, "saved": WRONG_SAVED})


def test_a_direct_backward_stays_in_its_row_whatever_its_ids_are():
    """No other memory is written, and a word that there is not gets no gradient."""
    logits = torch.randn(2, 3, 7)
    good = tokens_backward_arguments(logits, with_entropy=False)
    expected = TOKENS_BACKWARD(*good.values()).flatten(0, 1)
    ids = torch.tensor([0, 7, -1, 3, 2**62, -(2**63)])
    found = TOKENS_BACKWARD(*{**good, "token_ids": ids}.values()).flatten(0, 1)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[3], expected[3])
    for row in (1, 2, 4, 5):
        assert (found[row] < 0).all()
    good = divergence_backward_arguments(logits, logits + torch.randn(2, 3, 7), with_ids=True)
    for grad in DIVERGENCE_BACKWARD(*{**good, "token_ids": ids}.values()):
        assert grad.isfinite().all()


@pytest.mark.parametrize("argument", ["ref_logits", "keep", "token_ids"])
def test_a_direct_call_with_a_meta_tensor_is_traced(argument):
    """The dispatcher sends it to the fakes: nothing is read, the result holds nothing."""
    arguments = divergence_arguments(*random_logits(2, 3, 7), with_ids=True, keep=KEEP)
    arguments["logits"] = arguments["logits"].to("meta")
    arguments[argument] = arguments[argument].to("meta")
    assert all(output.is_meta for output in DIVERGENCE(*arguments.values())[:4])
