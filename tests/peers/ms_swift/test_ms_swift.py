"""``patch("ms_swift")`` against ms-swift itself: its trainers' methods, before and after.

The methods run on stand-ins for the trainers, because real trainers need real models.
"""

import dataclasses
import shlex
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import readme
import torch
from agreement_logits import random_logits
from comparison import assert_close, inputs, same_numbers
from swift.arguments import RLHFArguments
from swift.megatron.arguments import MegatronRLHFArguments
from swift.megatron.trainers import grpo_trainer as on_megatron
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers import gkd_loss, gkd_trainer, grpo_trainer, utils
from swift.utils import import_external_file

import klfast
from klfast.compat import PatchError, ms_swift

REPLACED = [
    "GRPOTrainer._compute_loss_and_metrics",
    "GRPOTrainer._compute_advantages",
    "MegatronGRPOTrainer.loss_func",
    "MegatronGRPOTrainer._compute_kl_from_batches",
    "GKDTrainer._compute_jsd_loss",
    "entropy_from_logits",
]
BETA = 0.3
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def trainer(**settings):
    """The attributes that both GRPO trainers' methods read."""
    of_loss = {
        "beta": BETA,
        "compute_entropy": False,
        "disable_rollout_importance_sampling": True,
        "epsilon_high": 0.2,
        "epsilon_low": 0.2,
        "importance_sampling_level": "token",
        "kl_in_reward": False,
        "log_rollout_offpolicy_metrics": False,
        "loss_type": "grpo",
        "off_policy_sequence_mask_delta": None,
        "overlong_filter": False,
        "rollout_importance_sampling_mode": None,
        "sdar_loss_coef": 0,
        "_has_teacher": False,
    }
    made = MagicMock(**{**of_loss, **settings})
    made.accelerator.gather_for_metrics = made._all_reduce_metric = lambda values: values
    made.args.delta, made.args.overlong_filter = None, False
    made.chord_sft_iterator = None
    made._metrics = defaultdict(lambda: defaultdict(list))
    return made


def batch(dtype=torch.float64, spread=0.3):
    """(the policy's log-probs, the rest of the batch), the same in each call."""
    torch.manual_seed(1)
    logprobs, ref_logprobs, old_logprobs, mask = inputs(spread, dtype)
    return logprobs, GRPOBatch(
        completion_mask=mask,
        truncated_mask=torch.zeros(len(mask), dtype=torch.bool),
        seq_lengths=mask.sum(-1),
        old_per_token_logps=old_logprobs,
        ref_per_token_logps=ref_logprobs,
        advantages=torch.randn(mask.shape, dtype=dtype),
    )


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Gather over one rank."""
    alone = lambda values, **group: values  # noqa: E731
    for name in ("gather", "gather_object"):
        monkeypatch.setattr(on_megatron, name, alone)
    monkeypatch.setattr(grpo_trainer, "gather", alone)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)


def of_the_loss(spread):
    """Loss, KL and gradient of both trainers."""
    made = []
    logprobs, rest = batch(spread=spread)
    for is_megatron in (False, True):
        leaf = logprobs.clone().requires_grad_()
        if is_megatron:
            data = {"grpo_batch": rest}
            loss, metrics = on_megatron.MegatronGRPOTrainer.loss_func(trainer(), leaf, data)
        else:
            on_transformers = trainer(
                _get_per_token_logps_and_entropies=lambda *a, leaf=leaf, **o: (leaf, None)
            )
            method = grpo_trainer.GRPOTrainer._compute_loss_and_metrics
            loss, metrics = method(on_transformers, None, {}, rest)
        kl = torch.as_tensor(metrics["kl"], dtype=torch.float64)
        made += [loss.detach(), kl, torch.autograd.grad(loss, leaf)[0]]
    return made


def of_the_reward(poison=0.0):
    """The KL that ``kl_in_reward`` subtracts in both trainers, with ``poison`` under the mask."""
    _, rest = batch()
    keep = rest.completion_mask
    rest.ref_per_token_logps = rest.ref_per_token_logps + torch.where(keep, 0.0, poison)
    given = trainer(
        kl_in_reward=True,
        dynamic_num_samples=False,
        num_generations=2,
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_func_names=["r"],
        advantage_estimator="grpo",
        scale_rewards="none",
    )
    given._logs = {"rewards": {"r": []}}
    rewards, data = torch.zeros(len(keep), 1, dtype=torch.float64), [{"grpo_batch": rest}]
    advantages = grpo_trainer.GRPOTrainer._compute_advantages(given, [], rewards, data)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(on_megatron, "get_local_rollout_values", lambda values, *ranks: values)
        megatron = on_megatron.MegatronGRPOTrainer._compute_kl_from_batches
        return advantages, megatron(given, data, len(keep), None)


@pytest.mark.parametrize("spread", [0.3, 25.0])
def test_all_of_it_is_replaced_and_loss_and_rewards_are_the_same(spread):
    theirs = of_the_loss(spread), of_the_reward()
    with klfast.compat.patch("ms_swift", strict=True) as made:
        assert str(made).startswith("klfast in ms_swift 4.6.0\n")
        assert [each.where.rpartition(":")[2] for each in made.replaced] == REPLACED
        assert made.left == ()
        ours = of_the_loss(spread), of_the_reward()
    assert_close(ours[0], theirs[0], **EXACT)
    assert_close(ours[1], theirs[1], **EXACT)


def test_nan_under_the_mask_stays_there_while_it_is_patched():
    theirs = of_the_reward()
    assert all(values.isnan().any() for values in of_the_reward(torch.nan))
    with klfast.compat.patch("ms_swift"):
        assert_close(of_the_reward(torch.nan), theirs, **EXACT)


@pytest.mark.parametrize("error", [ModuleNotFoundError, OSError])
def test_strict_does_without_megatron_but_not_with_a_broken_one(monkeypatch, error):
    def failing(name, *args):
        if name.startswith("swift.megatron"):
            raise error("no", name="megatron") if error is ModuleNotFoundError else error("no")
        return importing(name, *args)

    importing = klfast.compat.patching.importlib.import_module
    monkeypatch.setattr(klfast.compat.patching.importlib, "import_module", failing)
    if error is OSError:
        with pytest.raises(PatchError, match=r"not all of ms_swift 4.6.0 is known.*OSError"):
            klfast.compat.patch("ms_swift", strict=True)
        return
    with klfast.compat.patch("ms_swift", strict=True) as made:
        assert len(made.replaced) == 4
        assert {each.reason for each in made.left} == {
            "importing swift.megatron.trainers.grpo_trainer failed: megatron is not installed "
            "(as without Megatron)"
        }


def teacher_of(kind, labels, words=50):
    """The trainer's teacher: logits with more or fewer token ids, or its most likely token ids."""
    logits, _ = random_logits(*labels.shape, words, dtype=torch.float64)
    if kind == "logits":
        return gkd_loss.TeacherOutput(full_logits=logits, labels=labels.clone())
    values, indices = logits.log_softmax(-1).topk(4)
    return gkd_loss.TeacherOutput(topk_logprobs=values, topk_indices=indices, labels=labels.clone())


@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize(
    ("kind", "words"), [("logits", 50), ("logits", 45), ("logits", 60), ("likeliest", 50)]
)
def test_the_distillation_loss_is_the_same(kind, words, beta):
    student, _ = random_logits(2, 5, 50, dtype=torch.float64)
    labels = torch.tensor([[-100, 3, 4, -100, 1], [-100, -100, 9, 9, 9]])
    of_trainer = SimpleNamespace(beta=beta, temperature=0.7, gkd_logits_topk=None)

    def loss():
        torch.manual_seed(2)
        leaf = student.clone().requires_grad_()
        teacher = teacher_of(kind, labels, words)
        value = gkd_trainer.GKDTrainer._compute_jsd_loss(of_trainer, leaf * 1, teacher, labels)
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    theirs = loss()
    with klfast.compat.patch("ms_swift"):
        ours = loss()
    assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize(
    "name", ["gkd_loss", "extract_active", "jsd_loss", "TeacherOutput.select", "default_gather"]
)
def test_the_distillation_with_another_callee_is_left_alone(monkeypatch, name):
    """In 4.3, for example, ``extract_active`` reads an attribute that klfast does not know."""
    before = vars(gkd_trainer.GKDTrainer)["_compute_jsd_loss"]
    monkeypatch.setattr(f"swift.rlhf_trainers.gkd_loss.{name}", lambda *args: args)
    with klfast.compat.patch("ms_swift") as made:
        assert vars(gkd_trainer.GKDTrainer)["_compute_jsd_loss"] is before
        reasons = {each.where.rpartition(":")[2]: each.reason for each in made.left}
        assert reasons.keys() == {name, "GKDTrainer._compute_jsd_loss"}
        assert reasons["GKDTrainer._compute_jsd_loss"].endswith(f":{name} or not at all")


test_entropies = same_numbers(
    ms_swift, {"entropy_from_logits": utils.entropy_from_logits}, "ms_swift entropy"
)


@pytest.mark.parametrize("options", [RLHFArguments, MegatronRLHFArguments])
def test_the_page_s_command_has_ms_swift_s_options(options):
    words = shlex.split(readme.code("ms-swift-command").replace("\\\n", ""))
    known = {field.name for field in dataclasses.fields(options)}
    of_transformers = {"per_device_train_batch_size"} if options is MegatronRLHFArguments else set()
    named = {word[2:] for word in words if word.startswith("--")} - of_transformers
    assert {"rlhf_type", "external_plugins", "beta"} <= named <= known


@pytest.mark.usefixtures("nothing_stays_patched")
def test_ms_swift_loads_the_plugin(tmp_path, capsys):
    plugin = tmp_path / "klfast_plugin.py"
    plugin.write_text(readme.code("ms-swift-plugin"))
    import_external_file(str(plugin))
    assert "replaced  swift.rlhf_trainers.grpo_trainer:GRPOTrainer" in capsys.readouterr().out
    klfast.compat.unpatch("ms_swift")
