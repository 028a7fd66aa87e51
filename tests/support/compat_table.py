"""The table of ``klfast.compat`` has each function of klfast beside the framework's formula.

``test_compat.py`` is the engine. It calls ``ours`` and ``theirs`` of a row with the same inputs,
``theirs`` in float64, and expects the same numbers. ``frameworks`` and
``frameworks_distillation`` have the formulas. Other columns say what differs from row to row.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import frameworks as fw
import frameworks_distillation as fd
import torch

import klfast
from klfast.compat import ms_swift, openrlhf, presets, roll, skyrl, trl, trlx, verl

V = 37
K = 5
INF = torch.inf


class Row(NamedTuple):
    """A function of the inputs, and of the mask after them if there is one.

    Attributes:
        ours: klfast's; a tensor, or several of which the first is differentiated.
        theirs: the framework's, as a formula.
        inputs: dtype -> the inputs in float64.
        mask: 0 or a weight of each token. Both functions get it.
        leaves: how many inputs get a gradient.
        exact: ``ours`` has the option ``exact``, and lets through what the mask multiplies.
        per_token: the value has the shape of the tokens, whatever that is.
        drops_last: the value does not change without the last token id, if both models exclude it.
        off: what the formula adds to the numbers, absolutely.
        sums: of how many rounded numbers, each at most 1.75, a gradient is the sum.
    """

    ours: Callable
    theirs: Callable
    inputs: Callable
    mask: torch.Tensor | None = None
    leaves: int = 2
    exact: bool = False
    per_token: bool = False
    drops_last: bool = False
    off: float = 0.0
    sums: int = 0


RATIOS = (0.001, 0.1, 0.5, 1, 2.6, 2.62, 6, 10, 14, 20, 21, 40, 41)
"""Log-ratios below, at and above every limit. k3 is 10 at 2.61."""

LOG_WEIGHTS = (0, 1, -1, 2.5, -2.5)
TOKEN_MASK = torch.tensor([1, 0.25, 0, 2, 0.5]).expand(26, 5)
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [0, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
    ]
)
ROW_MASK = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0]])
MODEL_MASK = torch.tensor([[1, 0, 1], [0, 1, 1]])
WEIGHTS = torch.tensor([[1, 0, 2], [0.5, 1, 0]])
SCORES = torch.linspace(-2, 3, len(MASK), dtype=torch.float64)
TOKEN_SCORES = torch.linspace(-2, 3, MASK.numel(), dtype=torch.float64).view(MASK.shape)


def wide(tensor):
    """The dtype of scores beside log-probs: fp32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def pairs(dtype):
    """(logprobs, ref_logprobs) [26, 5] of all log-ratios. A large gradient overflows fp16."""
    x = torch.tensor([sign * x for x in RATIOS for sign in (1, -1)], dtype=torch.float64)
    x = x.clamp(-6, 6) if dtype == torch.float16 else x
    x = x[:, None].expand(26, 5)
    return x.clamp(max=0), (-x).clamp(max=0)


def triples(dtype):
    """``pairs``, and old_logprobs of all log-weights."""
    logprobs, ref_logprobs = pairs(dtype)
    return logprobs, ref_logprobs, logprobs - torch.tensor(LOG_WEIGHTS, dtype=torch.float64)


def sequences(dtype):
    """(logprobs, ref_logprobs, old_logprobs) of the mask above."""
    ref_logprobs = -4 * torch.rand(MASK.shape, dtype=torch.float64) - 0.1
    others = ref_logprobs + torch.randn(2, *MASK.shape, dtype=torch.float64)
    return others[0], ref_logprobs, others[1]


def two_sequences(dtype):
    return sequences(dtype)[:2]


def losses(dtype):
    return (torch.randn(MASK.shape, dtype=torch.float64),)


def distinct(*shape):
    """Logits that differ within a row in every dtype."""
    tokens = [torch.randperm(V) for _ in range(torch.Size(shape).numel())]
    return (torch.stack(tokens).view(*shape, V) - V // 2).double() / 8


def logits(dtype):
    """(logits [3, 4, V], a token id of each row, never the last id)."""
    return distinct(3, 4), torch.randint(V - 1, (3, 4))


def logits_of_several(dtype):
    return distinct(3, 4), torch.randint(V - 1, (3, 4, K))


def only_logits(dtype):
    return (distinct(3, 4),)


def models(dtype):
    """(student, teacher)."""
    return distinct(2, 3), distinct(2, 3)


def distributions(dtype):
    return tuple(x.log_softmax(-1) for x in models(dtype))


def few_of_a_teacher(dtype):
    """(student's logits [1, 6, V], the teacher's K log-probs and token ids)."""
    top = distinct(1, 6).log_softmax(-1).topk(K)
    return distinct(1, 6), top.values, top.indices


def padded(dtype):
    """The teacher excludes padding, all but one id of token [0, 0], and all ids of token [1, 1]."""
    student, teacher = models(dtype)
    teacher[..., -5:] = -INF
    teacher[0, 0, 1:] = -INF
    teacher[1, 1] = -INF
    return student, teacher


# Per token, over log-probs


per_token = partial(Row, inputs=pairs, per_token=True)
weighted = partial(Row, inputs=triples, per_token=True)
masked = partial(Row, inputs=pairs, mask=TOKEN_MASK, per_token=True, exact=True)


def of(preset, **options):
    return partial(klfast.kl_penalty, estimator=preset, **options)


def of_weighted(preset):
    return lambda a, b, old: klfast.kl_penalty(a, b, estimator=preset, old_logprobs=old)


def modes(name, table, ours, theirs, word, **differs):
    """Rows of a function for each name of its preset table. The argument is called ``word``."""
    make = masked if "mask" in differs else per_token
    return {
        f"{name} {mode}": make(partial(ours, **{word: mode}), partial(theirs, mode=mode), **differs)
        for mode in table
    }


def nemo_rl_loss(logprobs, ref_logprobs, old_logprobs=None, *, mode):
    weight = fw.nemo_rl_weight(logprobs, old_logprobs)
    return fw.nemo_rl(logprobs, ref_logprobs, mode, weight=weight)


def slime_weighted(logprobs, ref_logprobs, old_logprobs, *, mode):
    return fw.slime(logprobs, ref_logprobs, mode, (logprobs - old_logprobs).exp())


def trl_grpo(logprobs, ref_logprobs, old_logprobs=None, **options):
    return fw.trl_grpo(logprobs, ref_logprobs, old_logprobs=old_logprobs, **options)


def openrlhf_unbiased(logprobs, ref_logprobs, old_logprobs=None, *, mode):
    return fw.openrlhf(logprobs, ref_logprobs, mode, unbiased=True, old_logprobs=old_logprobs)


def open_instruct_weighted(logprobs, ref_logprobs, old_logprobs):
    return fw.open_instruct(logprobs, ref_logprobs, 3, old_logprobs)


K3 = partial(fw.trl_grpo, corrected=False)
OPENRLHF = openrlhf.compute_approx_kl
UNBIASED = partial(OPENRLHF, unbiased_gradient=True)
OPEN_INSTRUCT = {mode: preset for mode, preset in presets.OPEN_INSTRUCT.items() if mode < 3}
TOKENS = {
    **modes("verl", presets.VERL, verl.kl_penalty, fw.verl, "kl_penalty", exact=True),
    **modes("openrlhf", presets.OPENRLHF, OPENRLHF, fw.openrlhf, "kl_estimator"),
    **modes("openrlhf unbiased", presets.OPENRLHF, UNBIASED, openrlhf_unbiased, "kl_estimator"),
    **{
        f"openrlhf unbiased old {mode}": weighted(
            partial(UNBIASED, kl_estimator=mode), partial(openrlhf_unbiased, mode=mode)
        )
        for mode in presets.OPENRLHF
    },
    "roll": per_token(roll.compute_approx_kl, fw.roll, exact=True),
    **modes("roll", presets.ROLL, roll.compute_approx_kl, fw.roll, "kl_penalty", mask=TOKEN_MASK),
    **modes("trl ppo", presets.TRL_PPO, trl.kl_penalty, fw.trl_ppo, "kl_penalty", exact=True),
    "trl grpo": per_token(
        partial(trl.per_token_kl, use_bias_correction_kl=False), K3, exact=True
    ),
    "trl grpo corrected": per_token(trl.per_token_kl, trl_grpo, exact=True),
    "trl grpo corrected old": weighted(trl.per_token_kl, trl_grpo, exact=True),
    "skyrl": per_token(skyrl.compute_approx_kl, fw.skyrl, exact=True),
    **modes(
        "skyrl", presets.SKYRL, skyrl.compute_approx_kl, fw.skyrl, "kl_estimator_type",
        mask=TOKEN_MASK,
    ),
    "ms_swift k3": per_token(ms_swift.per_token_kl, fw.ms_swift, exact=True),
    "ms_swift k1": masked(ms_swift.per_token_k1, fw.roll),
    "trlx log_ratio": masked(trlx.log_ratio, fw.roll),
    "trlx kl": Row(of(presets.TRLX["kl"]), fw.k3_upside_down, pairs),
    **{
        f"{name} {mode}": Row(of(preset), partial(theirs, mode=mode), pairs)
        for name, table, theirs in (
            ("nemo_rl", presets.NEMO_RL, fw.nemo_rl),
            ("slime", presets.SLIME, fw.slime),
            ("areal", presets.AREAL, fw.areal),
            ("labs_molt", presets.LABS_MOLT, fw.labs_molt),
            ("open_instruct", OPEN_INSTRUCT, fw.open_instruct),
        )
        for mode, preset in table.items()
    },
    **{
        f"{name} weighted {mode}": Row(of_weighted(preset), partial(theirs, mode=mode), triples)
        for name, table, theirs in (
            ("nemo_rl", presets.NEMO_RL, nemo_rl_loss),
            ("slime", presets.SLIME, slime_weighted),
        )
        for mode, preset in table.items()
    },
    **{
        f"nemo_rl own weight {mode}": Row(
            lambda a, b, preset=preset: of_weighted(preset)(a, b, a.detach()),
            partial(nemo_rl_loss, mode=mode), pairs,
        )
        for mode, preset in presets.NEMO_RL.items()
    },
    "open_instruct 3": Row(
        of_weighted(presets.OPEN_INSTRUCT[3]), open_instruct_weighted, triples
    ),
    "liger": Row(of(presets.LIGER["k3"]), K3, pairs),
    "megatron_lm": Row(of(presets.MEGATRON_LM["k3"]), K3, pairs),
}  # fmt: skip


# Losses, rewards and averages of sequences


COUNTS = {
    "local": {},
    "global": {"dp_size": 4, "batch_num_tokens": 50, "global_batch_size": 12},
    "tensors": {
        "dp_size": 4,
        "batch_num_tokens": torch.tensor(50),
        "global_batch_size": torch.tensor(12.0),
    },
    "constant": {"loss_scale_factor": 1000},
}
NORMALIZERS = {"dr_grpo": 100, "cispo": torch.tensor(37.0), "dapo": torch.tensor(37), "vespo": 37.5}
CORRECTIONS = {
    "": {"use_bias_correction_kl": False},
    " corrected": {},
    " of sequences": {"importance_sampling_level": "sequence"},
}
of_sequences = partial(Row, inputs=two_sequences, mask=MASK)


def verl_kl_loss(logprobs, ref_logprobs, mask, *, word, **options):
    return verl.kl_loss(logprobs, ref_logprobs, word, mask, **options)


def trl_kl_loss(loss_type, **options):
    """(the loss, TRL's metric)."""

    def ours(logprobs, ref_logprobs, old, mask):
        loss, stats = trl.kl_loss(
            logprobs, ref_logprobs, mask, beta=0.04, loss_type=loss_type,
            normalizer=NORMALIZERS.get(loss_type), old_per_token_logps=old, **options,
        )  # fmt: skip
        return loss, stats.kl.sum() / stats.length.sum().clamp(min=1)

    def theirs(logprobs, ref_logprobs, old, mask):
        kl = fw.trl_grpo(
            logprobs, ref_logprobs, mask, old,
            corrected=options.get("use_bias_correction_kl", True),
            level=options.get("importance_sampling_level", "token"),
        )  # fmt: skip
        loss = fw.trl_reduce(kl, mask, loss_type, NORMALIZERS.get(loss_type))
        return 0.04 * loss, fw.trl_reduce(kl, mask, "bnpo")

    return Row(ours, theirs, sequences, mask=MASK)


class Batch(dict):
    """Stands for verl's TensorDict and SkyRL's TrainingInputBatch."""

    def __init__(self, **columns):
        super().__init__(columns)
        self.batch_size = columns["rewards"].shape[:1]
        self.metadata = {}


class Controller:
    """Takes an update under a framework's argument names alone."""

    value = 0.25

    def update(self, *, n_steps, current=None, current_kl=None):
        self.kl, self.n_steps = current if current_kl is None else current_kl, n_steps


def verl_reward(logprobs, ref_logprobs, mask, name):
    """(rewards, the KL that the controller gets, how often)."""
    scores, controller = TOKEN_SCORES.to(wide(logprobs)), Controller()
    batch = Batch(
        old_log_probs=logprobs, ref_log_prob=ref_logprobs, response_mask=mask,
        token_level_scores=scores, rewards=scores,
    )  # fmt: skip
    data, metrics = verl.apply_kl_penalty(SimpleNamespace(batch=batch), controller, name)
    assert metrics == {
        "actor/reward_kl_penalty": controller.kl,
        "actor/reward_kl_penalty_coeff": 0.25,
    }
    return data.batch["token_level_rewards"], controller.kl, controller.n_steps


def skyrl_reward(logprobs, ref_logprobs, mask, mode, controlled):
    """(rewards, logged metrics)."""
    algorithm = SimpleNamespace(kl_estimator_type=mode, kl_loss_coef=0.3)
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm)),
        reward_kl_controller=Controller() if controlled else None,
        all_metrics={"other": 1},
    )
    data = Batch(
        action_log_probs=logprobs, base_action_log_probs=ref_logprobs, loss_mask=mask,
        rewards=TOKEN_SCORES.to(wide(logprobs)),
    )  # fmt: skip
    assert skyrl.apply_reward_kl_penalty(trainer, data) is data
    metrics = data.metadata["metrics"]
    logged = {f"loss/{name}": value for name, value in metrics.items()}
    assert trainer.all_metrics == {"other": 1, **logged}
    if controlled:
        assert trainer.reward_kl_controller.kl == metrics["avg_kl"]
    return data["rewards"], *metrics.values()


def skyrl_reward_formula(logprobs, ref_logprobs, mask, mode, controlled):
    kl = fw.skyrl(logprobs, ref_logprobs, mask, mode)
    coef = 0.25 if controlled else 0.3
    average = fw.masked_mean(kl, mask).mean()
    return TOKEN_SCORES - coef * kl, average, kl.abs().amax(-1).mean(), coef


def attention(mask):
    """The mask of trlx, of T tokens, which have T - 1 log-probs."""
    return torch.cat([mask, mask[:, -1:]], 1)


SEQUENCES = {
    **{
        f"verl agg_loss {mode} {name}": Row(
            partial(verl.agg_loss, loss_agg_mode=mode, **counts),
            partial(fw.verl_agg_loss, mode=mode, **counts),
            losses, mask=MASK, leaves=1,
        )
        for mode in verl.REDUCTIONS for name, counts in COUNTS.items()
    },
    **{
        f"verl kl_loss {mode} {word} {name}": of_sequences(
            partial(verl_kl_loss, word=word, loss_agg_mode=mode, **counts),
            lambda a, b, mask, mode=mode, word=word, counts=counts: fw.verl_agg_loss(
                fw.verl(a, b, word), mask, mode, **counts
            ),
        )
        for mode in verl.REDUCTIONS
        for word, name in (("k3", "local"), ("abs", "global"), ("k3+", "constant"))
        for counts in (COUNTS[name],)
    },
    **{
        f"trl kl_loss {loss_type}{name}": trl_kl_loss(loss_type, **options)
        for loss_type in trl.REDUCTIONS for name, options in CORRECTIONS.items()
    },
    "trl sequence_kl": of_sequences(trl.sequence_kl, fw.trl_rloo),
    "ms_swift sequence_kl": of_sequences(ms_swift.sequence_kl, fw.trl_rloo),
    **{
        f"skyrl kl_loss {mode}": of_sequences(
            partial(skyrl.kl_loss, kl_estimator_type=mode),
            lambda a, b, mask, mode=mode: fw.masked_mean(fw.skyrl(a, b, mask, mode), mask).mean(),
        )
        for mode in presets.SKYRL
    },
    **{
        f"skyrl reward {mode} {controlled}": of_sequences(
            partial(skyrl_reward, mode=mode, controlled=controlled),
            partial(skyrl_reward_formula, mode=mode, controlled=controlled),
            leaves=0,
        )
        for mode in presets.SKYRL for controlled in (False, True)
    },
    **{
        f"verl reward {mode}": of_sequences(
            partial(verl_reward, name=mode),
            lambda a, b, mask, mode=mode: (
                *fw.verl_rewards(TOKEN_SCORES, a, b, mask, 0.25, mode), len(mask)
            ),
            leaves=0,
        )
        for mode in presets.VERL
    },
    **{
        f"openrlhf reward {r} {kl_coef} {clip}": Row(
            lambda kl, mask, r=r, kl_coef=kl_coef, clip=clip: openrlhf.compute_reward(
                r, kl_coef, kl, mask, clip
            ),
            lambda kl, mask, r=r, kl_coef=kl_coef, clip=clip: (
                fw.openrlhf_rewards(r, kl_coef, kl, mask, clip) * mask
            ),
            losses, mask=MASK, leaves=0,
        )
        for r in (4.5, SCORES) for kl_coef in (0.1, -0.5) for clip in (None, (-1.0, 2.5))
    },
    "trlx mean_kl": of_sequences(
        lambda a, b, mask: trlx.mean_kl(a, b, attention(mask))[:2],
        lambda a, b, mask: fw.trlx_mean_kl(a, b, attention(mask)),
        leaves=0,
    ),
    "trlx kl_rewards": of_sequences(
        lambda a, b, mask: trlx.kl_rewards(SCORES.to(wide(a)), a, b, attention(mask), 0.25),
        lambda a, b, mask: fw.trlx_rewards(SCORES, a, b, attention(mask), 0.25) * mask,
        leaves=0,
    ),
}  # fmt: skip


def labels(mask, index=1):
    return torch.where(mask != 0, index, fd.IGNORED)


def joint(x, index, mask=None, *, which, **options):
    return trl.selective_log_softmax_and_entropy(
        x, index, temperature=0.7, row_mask=mask, **options
    )[which]


over_logits = partial(Row, leaves=1, per_token=True, drops_last=True)
SKYRL_ENTROPY = partial(skyrl.chunked_entropy_from_logits, requires_grad=True)
LOGITS = {
    **{
        name: over_logits(ours, fw.logprobs_of, logits, exact=exact)
        for name, ours, exact in (
            ("verl logprobs", verl.logprobs_from_logits, True),
            ("verl logprobs elsewhere",
             partial(verl.logprobs_from_logits, inplace_backward=False), False),
            ("openrlhf logprobs", openrlhf.log_probs_from_logits, True),
            ("roll logprobs", roll.log_probs_from_logits, False),
            ("trl logprobs", trl.selective_log_softmax, True),
            ("skyrl logprobs", skyrl.logprobs_from_logits, True),
        )
    },
    **{
        f"{name} labels": over_logits(
            lambda x, index, mask, ours=ours: ours(x, labels(mask, index)),
            lambda x, index, mask: fw.logprobs_of(x, index) * mask,
            logits, mask=ROW_MASK,
        )
        for name, ours in (
            ("verl", verl.logprobs_from_logits), ("openrlhf", openrlhf.log_probs_from_logits)
        )
    },
    "openrlhf logprobs of a temperature": over_logits(
        partial(openrlhf.log_probs_from_logits, temperature=0.7),
        partial(fw.logprobs_of, temperature=0.7), logits,
    ),
    "trl logprobs of a temperature": over_logits(
        lambda x, index, mask, **o: trl.selective_log_softmax(x, index, 1.3, mask, **o),
        lambda x, index, mask: fw.logprobs_of(x, index, 1.3) * mask, logits, mask=ROW_MASK,
    ),
    "trl logprobs of several": over_logits(
        partial(trl.selective_log_softmax, temperature=1.3),
        partial(fw.logprobs_of, temperature=1.3), logits_of_several, exact=True,
        per_token=False, sums=K,
    ),
    "trl joint logprobs": over_logits(
        partial(joint, which=0), lambda x, index, mask: fw.logprobs_of(x, index, 0.7) * mask,
        logits, mask=ROW_MASK,
    ),
    "trl joint entropy": over_logits(
        partial(joint, which=1), lambda x, index, mask: fw.entropy_of(x, 0.7) * mask,
        logits, mask=ROW_MASK,
    ),
    **{
        f"{name} entropy": over_logits(ours, fw.entropy_of, only_logits, exact=exact)
        for name, ours, exact in (
            ("verl", verl.entropy_from_logits, True),
            ("verl chunked", verl.entropy_from_logits_with_chunking, False),
            ("openrlhf", openrlhf.compute_entropy, True),
            ("roll", roll.entropy_from_logits, False),
            ("trl", trl.entropy_from_logits, True),
            ("skyrl", SKYRL_ENTROPY, True),
            ("ms_swift", ms_swift.entropy_from_logits, True),
        )
    },
    "skyrl entropy masked": over_logits(
        lambda x, mask: SKYRL_ENTROPY(x, attention_mask=mask),
        lambda x, mask: fw.entropy_of(x) * mask, only_logits, mask=ROW_MASK,
    ),
}  # fmt: skip


BETAS = (0, 0.1, 0.5, 1)
GKD = {
    "batchmean": {},
    "sum": {"reduction": "sum"},
    "mean": {"reduction": "mean"},
    "number": {"num_items_in_batch": 7},
    "number-tensor": {"num_items_in_batch": torch.tensor(7), "reduction": "none"},
}
OBJECTIVES = {"forward_kl": 0, "reverse_kl": 1, "js_divergence": 0.5}
of_models = partial(Row, inputs=models, drops_last=True)


def interpolated(student, teacher, mask=None, *, b):
    """Per-token values, 0 for masked tokens."""
    values = fd.interpolated(student, teacher, b, 1.0)
    return values if mask is None else torch.where(mask != 0, values * mask, 0.0)


def gkd(beta, options, labelled):
    """Rows without labels and with labels."""
    ours = partial(trl.generalized_jsd_loss, beta=beta, temperature=0.7, **options)
    plain = {k: v for k, v in options.items() if k != "reduction" or v != "none"}

    def theirs(student, teacher, mask=None):
        given = None if mask is None else labels(mask)
        weights = fd.gkd_weights((2, 3), student.shape[-1], given, **plain)
        return fd.total(fd.interpolated(student, teacher, beta, 0.7), weights)

    drops_last = options.get("reduction") != "mean"
    if not labelled:
        return of_models(ours, theirs, drops_last=drops_last)
    return of_models(
        lambda s, t, mask: ours(s, t, labels(mask)), theirs, mask=MODEL_MASK, drops_last=drops_last
    )


def few(beta, tail, temperature, words):
    """Per-token values over the entries that ``words`` takes from (student, teacher)."""

    def of_token(student, teacher):
        likeliest = (set(x.topk(K).indices.tolist()) for x in (student, teacher))
        ids = torch.tensor(sorted(words(*likeliest)))
        pair = (fd.likeliest(x / temperature, ids, tail) for x in (student, teacher))
        return fd.interpolated_of_logprobs(*pair, beta)

    def theirs(student, teacher, mask=None):
        rows = zip(student.flatten(0, -2), teacher.flatten(0, -2), strict=True)
        values = torch.stack([of_token(*row) for row in rows]).view(student.shape[:-1])
        return values if mask is None else values * mask

    return theirs


def self_distillation(beta, tail):
    def ours(student, teacher, mask):
        return trl.compute_topk_self_distillation_loss(
            student, teacher, distillation_topk=K, distillation_alpha=beta,
            distillation_add_tail=tail, mask=mask,
        )  # fmt: skip

    theirs = few(beta, tail, 1.0, lambda own, its: own)
    return Row(ours, theirs, models, mask=WEIGHTS, per_token=True)


def iw_opd(beta, tail):
    values = few(beta, tail, 0.7, lambda own, its: {0: its, 1: own}.get(beta, own | its))

    def ours(student, teacher, mask):
        return trl.iw_opd_generalized_jsd_loss(
            student, teacher, labels(mask), beta, 0.7, top_k=K, add_tail=tail
        )

    def theirs(student, teacher, mask):
        return values(student, teacher, mask).sum() / mask.sum().clamp(min=1)

    return Row(ours, theirs, models, mask=MODEL_MASK)


def swift_teacher(full=None, labels=None, logprobs=None, indices=None):
    """The part of ms-swift's ``TeacherOutput`` that klfast reads."""
    return SimpleNamespace(
        full_logits=full, labels=labels, topk_logprobs=logprobs, topk_indices=indices
    )


def swift(beta, few=False, width=V):
    """(the loss, the number of tokens). The teacher has K ids, or a full or other vocabulary."""

    def ours(student, teacher, mask):
        top = teacher.double().log_softmax(-1).topk(K)
        given = swift_teacher(teacher[..., :width])
        if few:
            given = swift_teacher(logprobs=top.values.to(student.dtype), indices=top.indices)
        return ms_swift.gkd_loss(student, given, labels(mask), beta, 0.7)

    def theirs(student, teacher, mask):
        pair = fd.filled_up(student, teacher[..., :width])
        if few:
            top = teacher.log_softmax(-1).topk(K)
            pair = student.gather(-1, top.indices), top.values
        return fd.total(fd.interpolated(*pair, beta, 0.7), mask), mask.sum()

    return Row(ours, theirs, models, mask=MODEL_MASK, leaves=1, drops_last=not few and width == V)


def various(objective, temperature=1.0):
    config = SimpleNamespace(kd_objective=objective, kd_temperature=temperature)
    return roll.VariousDivergence(config)


def teacher_logprobs(teacher, temperature=1.0):
    """The teacher's numbers as ROLL sends them, not rounded to the logits' dtype."""
    return (teacher.double() / temperature).log_softmax(-1).to(wide(teacher))


def roll_values(student, teacher, objective, temperature):
    excluded = teacher == -INF
    probs = (teacher / temperature).softmax(-1).nan_to_num(0)
    return fd.roll(student, probs, objective, temperature, excluded)


def roll_row(objective, temperature, inputs):
    loss = various(objective, temperature)

    def ours(student, teacher):
        return loss(student, None, teacher_logprobs(teacher, temperature), teacher == -INF)

    theirs = partial(roll_values, objective=objective, temperature=temperature)
    return roll_differs(ours, theirs, inputs, objective, per_token=True)


def roll_differs(ours, theirs, inputs, objective, **differs):
    """ROLL's Jensen-Shannon adds 1e-9 inside of logarithms."""
    off = V * 4e-9 if objective == "js_divergence" else 0.0
    sums = inputs is padded  # of two divergences
    return Row(ours, theirs, inputs, leaves=1, off=off, sums=sums, **differs)


def roll_op(objective, reduction, of_few, by_labels, inputs=models):
    """(the loss, the number of tokens)."""

    def given(student, teacher):
        top = teacher.topk(K) if of_few else SimpleNamespace(values=teacher, indices=None)
        return top.values, top.indices

    def ours(student, teacher, mask):
        values, indices = given(student, teacher)
        excluded = values == -INF if inputs is padded else None
        masks = (labels(mask), None) if by_labels else (None, mask)
        return roll.op_compute_various_divergence(
            various(objective), student, None, teacher_logprobs(values), indices, excluded,
            *masks, reduction,
        )  # fmt: skip

    def theirs(student, teacher, mask):
        values, indices = given(student, teacher)
        words = student if indices is None else student.gather(-1, indices)
        values = roll_values(words, values, objective, 1.0)
        divisor = mask.sum().clamp(min=1) if reduction == "mean" else 1
        return fd.total(values, mask / divisor), mask.sum()

    return roll_differs(ours, theirs, inputs, objective, mask=MODEL_MASK)


def skyrl_few(student, teacher, mask, k, shift):
    values, indices = teacher.roll(-shift, 1).topk(min(k, V))
    return fd.total(
        fd.soft_cross_entropy(student.gather(-1, indices), values), fd.draft_weights(mask)
    )


def verl_topk(clamp):
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp))

    def ours(student, logprobs, ids):
        found = verl.compute_forward_kl_topk(student, logprobs, ids, config, "thd")
        return found["distillation_losses"]

    return Row(ours, partial(fd.verl_topk, clamp=clamp), few_of_a_teacher, leaves=1)


FULL = {
    "roll": partial(roll.compute_approx_kl, kl_penalty="full"),
    "trl": partial(trl.kl_penalty, kl_penalty="full"),
}
FULL_SELF = trl.compute_full_logit_self_distillation_loss
MODELS = {
    **{
        f"trl gkd {beta} {name} {'labels' if labelled else ''}": gkd(beta, options, labelled)
        for beta in BETAS for name, options in GKD.items() for labelled in (False, True)
        if beta == 0.1 or name == "batchmean"
    },
    **{
        f"trl self-distillation {beta}": of_models(
            lambda s, t, mask, beta=beta: FULL_SELF(s, t, distillation_alpha=beta, mask=mask),
            partial(interpolated, b=beta), mask=WEIGHTS, per_token=True,
        )
        for beta in BETAS
    },
    # Log-probs are logits to klfast. At the logits the gradient is the same, see test_compat.py.
    **{
        f"trl compute_divergence {beta}": Row(
            partial(trl.compute_divergence, alpha=beta), partial(fd.interpolated, b=beta),
            distributions, per_token=True,
        )
        for beta in BETAS
    },
    **{
        f"{name} full": Row(ours, partial(fd.interpolated, b=1), distributions, per_token=True)
        for name, ours in FULL.items()
    },
    "roll full masked": Row(
        lambda a, b, mask: FULL["roll"](a, b, mask), partial(interpolated, b=1), distributions,
        mask=WEIGHTS, per_token=True,
    ),
    **{
        f"trl {name} {beta} {'tail' if tail else ''}": make(beta, tail)
        for name, make in (("top-k self-distillation", self_distillation), ("iw_opd", iw_opd))
        for beta in BETAS for tail in (False, True)
    },
    **{
        f"ms_swift jsd_loss {beta}": of_models(
            lambda s, t, beta=beta: ms_swift.jsd_loss(s.flatten(0, 1), t.flatten(0, 1), beta),
            lambda s, t, beta=beta: fd.interpolated(s, t, beta).sum(),
        )
        for beta in BETAS
    },
    **{f"ms_swift gkd {beta}": swift(beta) for beta in BETAS},
    **{f"ms_swift gkd of a few {beta}": swift(beta, few=True) for beta in BETAS},
    **{f"ms_swift gkd of fewer {beta}": swift(beta, width=V - 5) for beta in BETAS},
    **{
        f"roll {objective} {temperature} {inputs.__name__}": roll_row(
            objective, temperature, inputs
        )
        for objective in OBJECTIVES for temperature in (1.0, 0.5) for inputs in (models, padded)
    },
    **{
        f"roll op {objective} {reduction} {inputs.__name__} {'few' if of_few else ''}": roll_op(
            objective, reduction, of_few, by_labels=of_few, inputs=inputs
        )
        for objective in OBJECTIVES for reduction in ("mean", "sum")
        for of_few in (False, True) for inputs in (models, padded)
    },
    **{
        f"skyrl draft {factor}": of_models(
            partial(skyrl.draft_soft_ce, global_normalization_factor=factor),
            lambda s, t, mask, factor=factor: fd.total(
                fd.soft_cross_entropy(s, t), fd.draft_weights(mask, factor)
            ),
            mask=0.3 * MODEL_MASK, leaves=1, drops_last=False,
        )
        for factor in (None, 9, torch.tensor(9.0), torch.tensor(0.5))
    },
    **{
        f"skyrl draft of {k} shifted by {shift}": Row(
            partial(skyrl.draft_soft_ce_topk, k=k, roll_shift=shift),
            partial(skyrl_few, k=k, shift=shift), models, mask=torch.ones(2, 3), leaves=1,
        )
        for k in (3, 1000) for shift in (0, 1)
    },
    **{f"verl top-k {clamp}": verl_topk(clamp) for clamp in (None, -3.0)},
}  # fmt: skip
ROWS = TOKENS | SEQUENCES | LOGITS | MODELS
