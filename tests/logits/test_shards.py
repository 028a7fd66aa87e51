"""Vocabulary shards are compared with whole rows and heads on every backend."""

import math

import agreement_logits as al
import pytest
import torch
from agreement import same_bits
from shards import OnDevicesAlone, found_over_shards, over_shards, sharded, shards_of

import klfast
from klfast.args.rows import RowsArgs
from klfast.cli.check.cases import FAMILIES
from klfast.cli.check.compare import truth_of, wrong_of

pytestmark = pytest.mark.usefixtures("one_thread")
NAN, INF = math.nan, math.inf
WORDS = 37
CUTS = {
    "two": (20,),
    "three-unequal": (1, 30),
    "an-empty-one": (16, 16),
    "the-first-empty": (0,),
    "the-last-empty": (WORDS,),
    "five": (7, 8, 20, 36),
}

every_direction = pytest.mark.parametrize("direction", ["reverse", "forward"])
every_cut = pytest.mark.parametrize("edges", CUTS.values(), ids=CUTS)


FAMILIES_OF_WORDS = [name for name in FAMILIES if not name.startswith(("penalty", "rew", "roll"))]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES_OF_WORDS)
def test_every_option(backend, family):
    """The cuts take turns, and some leave a shard empty. Only top-K calls have every direction."""
    of, faults = FAMILIES[family], {}
    for case in of.cases(family):
        row = {**case.row}
        if not case.is_basic or row.get("inplace_backward"):
            continue
        if "top-k" not in family and row.get("direction") not in (None, "reverse"):
            row["direction"] = "forward"
        shares = tuple(CUTS.values())[case.seed % len(CUTS)]
        edges = tuple(edge * row["words"] // WORDS for edge in shares)
        call = of.call(row, case.seed)
        if found := wrong_of(truth_of(call), found_over_shards(call, backend, edges)):
            faults[case.name, edges] = found
    assert not faults


@every_cut
@every_direction
def test_shards_without_a_word_that_is_possible(backend, edges, direction):
    """The first model excludes all ids of some shards. The second model has others there."""
    logits, ref_logits = filtered([[3, 4], [21, 36], [0, 36], [18, 19]])
    both = tuple(torch.where(logits == -INF, -INF, model) for model in (logits, ref_logits))
    first = (logits, ref_logits) if direction == "reverse" else (ref_logits, logits)
    options = {"direction": direction, "return_entropy": True}
    options["token_ids"] = torch.tensor([[3, 36, 0, 19]])

    def results(backend, models):
        inputs = al.leaves(*models)
        outputs = al.tensors_of(klfast.kl_divergence(*inputs, backend=backend, **options))
        sum((al.uneven(x) * (i + 1) * x).sum() for i, x in enumerate(outputs)).backward()
        return [*outputs, *(x.grad for x in inputs)]

    for models in (first, both):
        with over_shards(edges):
            found = results(backend, models)
        truth = results("reference", [model.double() for model in models])
        for x, exact in zip(found, truth, strict=True):
            assert (x.double() - exact).norm() <= 4e-6 * exact.norm()


@pytest.mark.parametrize("backend", al.COMPILED, indirect=True)
@pytest.mark.parametrize(("apart", "bar"), [(1e-2, 2e-6), (1e-3, 1e-4)])
@every_direction
def test_digits_near_the_policy(backend, direction, apart, bar):
    """The promise of whole rows holds at 5e-5 and 5e-7 nats. Equal models have exactly 0."""
    logits = al.random_logits(2, 8, 1500, apart=apart)
    wide = [model.double() for model in logits]
    truth = klfast.kl_divergence(*wide, direction=direction, backend="reference")
    with over_shards((7, 700)):
        found = klfast.kl_divergence(*logits, direction=direction, backend=backend)
        equal = klfast.kl_divergence(logits[0], logits[0], direction=direction, backend=backend)
    assert (found / truth - 1).abs().max() <= min(bar, 2e-6)
    assert not equal.any()


@pytest.mark.parametrize("apart", [0.0, 1e-9], ids=["equal", "near"])
@every_direction
def test_no_divergence_is_negative_and_of_equals_it_is_0(backend, direction, apart):
    logits = al.random_logits(4, 8, WORDS, dtype=torch.float64)[0]
    other = (logits + apart * torch.randn_like(logits)).transpose(0, 2).contiguous().transpose(0, 2)
    with over_shards(CUTS["five"]):
        found = klfast.kl_divergence(logits, other, direction=direction, backend=backend)
    assert (found >= 0).all()
    assert apart or not found.any()


def filtered(kept):
    """Logits [1, 4, V] with a few ids, as after top-k sampling."""
    logits, ref_logits = al.random_logits(1, 4, WORDS)
    words = torch.arange(WORDS)
    for row, places in enumerate(kept):
        logits[0, row, ~torch.isin(words, torch.tensor(places))] = -INF
    return logits, ref_logits


@every_direction
def test_a_shard_that_the_second_model_excludes(backend, direction):
    """The divergence is infinite. Log-probs, entropies and other rows do not change."""
    second, first = filtered([[3, 25], [21, 36]])
    first[0, 0, 20:] -= 2000  # without mass in float64
    logits, ref_logits = (first, second) if direction == "reverse" else (second, first)
    ids = torch.tensor([[3, 30, 5, 7]])
    options = {"direction": direction, "token_ids": ids, "return_entropy": True}
    with over_shards((20,)):
        found = klfast.kl_divergence(logits, ref_logits, **options, backend=backend)
    truth = klfast.kl_divergence(logits, ref_logits, **options, backend="reference")
    assert found.kl.isinf().tolist() == [[True, True, False, False]]
    for x, exact in zip(al.tensors_of(found), al.tensors_of(truth), strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [NAN, INF])
@every_direction
def test_nan_and_infinity_show_in_their_row_alone(backend, direction, poison):
    for side in (0, 1):
        models = list(al.random_logits(1, 3, WORDS))
        models[side][0, 1, 30] = poison
        models[side][0, 1, 20:30] = -INF
        with over_shards((20,)):
            found = al.everything(backend, *models, torch.tensor([[0, 5, 9]]), direction)
        assert all(x[0, ::2].isfinite().all() for x in found)
        of_tokens = found[-3:-1] if side == 0 else ()
        for x in (found[0], *of_tokens):
            assert x.isnan().tolist() == [[False, True, False]]
        assert found[3 + side][0, 1].isnan().any()


@every_direction
def test_one_rank_has_the_bits_of_no_group(backend, direction):
    logits = al.random_logits(2, 3, WORDS)
    ids = al.random_ids(logits[0])
    alone = al.everything(backend, *logits, ids, direction)
    with over_shards(()):
        al.assert_same(al.everything(backend, *logits, ids, direction), alone)


def test_what_travels():
    """The forward gathers 32 integers and a few numbers per row. The backward gathers nothing."""
    logits, ref_logits = al.random_logits(2, 3, WORDS)
    ids = al.random_ids(logits)
    for function, models, others, options, columns in (
        (klfast.token_logprobs, (logits,), (ids,), {}, 3),
        (klfast.token_logprobs, (logits,), (ids,), {"return_entropy": True}, 4),
        (klfast.kl_divergence, (logits, ref_logits), (), {}, 5),
        (klfast.kl_divergence, (logits, ref_logits), (), {"token_ids": ids}, 7),
    ):
        tables, inputs = [], al.leaves(*models)
        found = sharded(function, (20,), tables)(*inputs, *others, **options)
        sum(x.sum() for x in al.tensors_of(found)).backward()
        assert tables == [[(32,), (columns, 6)]] * 2
        assert all(model.grad is not None for model in inputs)


def test_a_group_that_serves_no_cpu_is_never_asked_on_the_host(backend):
    """The bits are the same if ranks agree. If not, all tokens and the gradient are NaN."""
    logits, ref_logits = al.random_logits(2, 3, WORDS)
    ids, tables = al.random_ids(logits), []
    for function, models, others in (
        (klfast.token_logprobs, (logits,), (ids,)),
        (klfast.kl_divergence, (logits, ref_logits), ()),
    ):
        on_host = sharded(function, (20,))(*models, *others, backend=backend)
        on_device = sharded(function, (20,), tables, OnDevicesAlone)
        assert same_bits(on_device(*models, *others, backend=backend), on_host)
        inputs = al.leaves(*models)
        found = sharded(
            function,
            (20,),
            kind=OnDevicesAlone,
            of_rank=lambda rank, options: {**options, "temperature": (1.0, 0.5)[rank]},
        )(*inputs, *others, backend=backend)
        found.sum().backward()
        assert found.isnan().all()
        assert inputs[0].grad.isnan().all()
    if backend != "reference":  # which gathers the logits
        assert tables == [[(2,), (3, 6)]] * 2 + [[(2,), (5, 6)]] * 2


@pytest.mark.parametrize("wrong", [-1, WORDS, WORDS + 20])
@pytest.mark.parametrize("backend", ["reference", "native-emulated"], indirect=True)
def test_an_id_in_no_shard_is_nan_where_none_looks(backend, wrong, monkeypatch):
    """GPUs do not check ids. Other tokens and entropies do not change."""
    monkeypatch.setattr(RowsArgs, "check_values", lambda args: None)
    logits, ref_logits = al.random_logits(2, 3, WORDS)
    ids = al.random_ids(logits)
    wrong_ids = ids.clone()
    wrong_ids[1, 1] = wrong
    with over_shards((20,)):
        options = {"return_entropy": True, "backend": backend}
        tokens = klfast.token_logprobs(logits, wrong_ids, **options)
        pair = klfast.kl_divergence(logits, ref_logits, token_ids=wrong_ids, **options)
    whole = klfast.kl_divergence(logits, ref_logits, token_ids=ids, **options)
    for found, exact in (
        *((x, whole.logprobs) for x in (tokens.logprobs, pair.logprobs)),
        (pair.ref_logprobs, whole.ref_logprobs),
    ):
        assert found[1, 1].isnan()
        exact = exact.clone()
        exact[1, 1] = NAN
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6, equal_nan=True)
    for found in (tokens.entropy, pair.entropy):
        torch.testing.assert_close(found, whole.entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pair.kl, whole.kl, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", al.COMPILED, indirect=True)
def test_the_gradient_may_take_the_logits_memory(backend):
    (leaf,) = al.leaves(al.random_logits(2, 3, WORDS)[0])
    ids = al.random_ids(leaf)
    with over_shards((20,)):
        klfast.token_logprobs(leaf, ids, backend=backend).sum().backward()
    inputs = al.leaves(*(shard.contiguous() for shard in shards_of(leaf, (20,))))
    made = [shard * 1 for shard in inputs]

    def of_made(logits, token_ids, group, **options):
        return klfast.token_logprobs(made[group.rank], token_ids, group=group, **options)

    call = sharded(of_made, (20,))
    found = call(leaf, ids, inplace_backward=True, backend=backend)
    found.sum().backward(retain_graph=True)
    for own, of_model, grad in zip(inputs, made, shards_of(leaf.grad, (20,)), strict=True):
        assert same_bits(own.grad, grad.contiguous())
        assert same_bits(of_model.detach(), grad.contiguous())
    with pytest.raises(RuntimeError, match="must be False for a second backward"):
        found.sum().backward()


def test_memory_of_the_logits_size_is_the_gradients_alone():
    """On a CPU, where torch's profiler of memory sees every allocation."""
    rows, words = 64, 8192
    logits, ref_logits = al.leaves(*al.random_logits(1, rows, words))
    ids = al.random_ids(logits)
    size = rows * words // 2 * 4
    for call in (
        lambda: klfast.kl_divergence(logits, ref_logits, token_ids=ids, return_entropy=True).kl,
        lambda: klfast.token_logprobs(logits, ids),
    ):
        with over_shards((words // 2,)), torch.profiler.profile(profile_memory=True) as profiled:
            found = call()
        large = [e for e in profiled.events() if e.cpu_memory_usage >= size // 8]
        assert not large
        assert found.shape == (1, rows)
