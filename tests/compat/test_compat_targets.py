"""What ``patch`` replaces in SkyRL, NeMo-RL, slime, AReaL, open-instruct and ms-swift.

The frameworks here are made up, with the statements and the call forms of theirs; tests of the real
ones need their packages.
"""

import functools
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from packages import retargeted

from klfast.compat import (
    Left,
    areal,
    ms_swift,
    nemo_rl,
    open_instruct,
    patch,
    skyrl,
    slime,
    unpatch,
)
from klfast.compat.patching.fingerprints import PatchError, fingerprint
from klfast.compat.patching.sites import known, known_compiled
from klfast.compat.targets import TARGETS

pytestmark = pytest.mark.usefixtures("nothing_stays_patched")


def log_probs(shape=(3, 6)):
    """(logprobs, ref_logprobs, old_logprobs, mask)."""
    logprobs = -torch.rand(shape, dtype=torch.float64)
    ref_logprobs = logprobs - 4 * torch.randn(shape, dtype=torch.float64)
    old_logprobs = logprobs + 0.3 * torch.randn(shape, dtype=torch.float64)
    return logprobs, ref_logprobs, old_logprobs, torch.rand(shape) < 0.7


# ms-swift

SWIFT_UTILS = """
import functools

calls = []


def profiling_decorator(function):
    @functools.wraps(function)
    def timed(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return timed
"""
SWIFT = """
import torch
from swift.rlhf_trainers.utils import profiling_decorator


class GRPOTrainer:
    def _compute_loss_and_metrics(self, per_token_logps, ref_per_token_logps):
        safe_ratio = torch.clamp(ref_per_token_logps - per_token_logps, min=-20, max=20)
        per_token_kl = torch.clamp(torch.exp(safe_ratio) - safe_ratio - 1, min=-10, max=10)
        return per_token_kl

    def _compute_advantages(self, grpo_batch):
        per_token_kl = grpo_batch.old_per_token_logps - grpo_batch.ref_per_token_logps
        kl = (per_token_kl * grpo_batch.completion_mask).sum(-1)
        return kl


class MegatronGRPOTrainer:
    {decorator}
    def loss_func(self, per_token_logps, ref_per_token_logps):
        safe_ratio = torch.clamp(ref_per_token_logps - per_token_logps, min=-20, max=20)
        per_token_kl = torch.clamp(torch.exp(safe_ratio) - safe_ratio - 1, min=-10, max=10)
        return per_token_kl

    def _compute_kl_from_batches(self, grpo_batch):
        per_token_kl = grpo_batch.old_per_token_logps - grpo_batch.ref_per_token_logps
        sample_kl = (per_token_kl * grpo_batch.completion_mask).sum(-1)
        return sample_kl
"""
NOT_DECORATED = "# as it is"
INLINE = [
    "GRPOTrainer._compute_loss_and_metrics",
    "GRPOTrainer._compute_advantages",
    "MegatronGRPOTrainer.loss_func",
    "MegatronGRPOTrainer._compute_kl_from_batches",
]


def swift(package, decorator="@profiling_decorator"):
    text = SWIFT.format(decorator=decorator)
    return package(
        {
            "swift.rlhf_trainers.utils": SWIFT_UTILS,
            "swift.rlhf_trainers.grpo_trainer": text,
            "swift.megatron.trainers.grpo_trainer": text,
        }
    )


def of_swift(trainer, megatron):
    """What all four methods make of the same tokens, with the gradients of the loss's two."""
    logprobs, ref_logprobs, old_logprobs, mask = log_probs()
    logprobs.requires_grad_()
    batch = SimpleNamespace(
        old_per_token_logps=old_logprobs, ref_per_token_logps=ref_logprobs, completion_mask=mask
    )
    of_loss = [
        trainer.GRPOTrainer()._compute_loss_and_metrics(logprobs, ref_logprobs),
        megatron.MegatronGRPOTrainer().loss_func(logprobs, ref_logprobs),
    ]
    grads = [torch.autograd.grad(kl.sum(), logprobs)[0] for kl in of_loss]
    of_reward = [
        trainer.GRPOTrainer()._compute_advantages(batch),
        megatron.MegatronGRPOTrainer()._compute_kl_from_batches(batch),
    ]
    return *(kl.detach() for kl in of_loss), *grads, *of_reward


@pytest.mark.parametrize("decorator", ["@profiling_decorator", NOT_DECORATED])
def test_ms_swifts_inline_kl_is_replaced_in_both_trainers(package, decorator):
    utils, trainer, megatron = swift(package, decorator)
    torch.manual_seed(0)
    theirs = of_swift(trainer, megatron)
    before = [len(utils.calls)]
    with patch("ms_swift") as made:
        torch.manual_seed(0)
        ours = of_swift(trainer, megatron)
        before.append(len(utils.calls))
    assert [each.where.rpartition(":")[2] for each in made.replaced] == INLINE
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    timed = 0 if decorator == NOT_DECORATED else 1
    assert before == [timed, 2 * timed]


def test_ms_swifts_kl_is_klfasts_while_it_is_patched(package):
    """NaN under the mask stays there, which it does not in ms-swift."""
    _, trainer, _ = swift(package)
    logprobs, ref_logprobs, _, mask = log_probs()
    batch = SimpleNamespace(
        old_per_token_logps=logprobs,
        ref_per_token_logps=torch.where(mask, ref_logprobs, torch.nan),
        completion_mask=mask,
    )
    with patch("ms_swift"):
        assert trainer.GRPOTrainer()._compute_advantages(batch).isfinite().all()
    assert trainer.GRPOTrainer()._compute_advantages(batch).isnan().any()


def test_a_method_of_ms_swift_that_somebody_else_has_wrapped_is_left_alone(package):
    _, _, megatron = swift(package)
    theirs = megatron.MegatronGRPOTrainer.loss_func

    @functools.wraps(theirs)
    def wrapper(*args):
        return theirs(*args)

    megatron.MegatronGRPOTrainer.loss_func = wrapper
    with patch("ms_swift") as made:
        left = [each.where for each in made.left if "loss_func" in each.where]
        assert len(left) == 1
        assert megatron.MegatronGRPOTrainer.loss_func is wrapper


# open-instruct

OPEN_INSTRUCT_UTILS = """
import torch


def estimate_kl(ref_logprobs_diff, ratio):
    x = ref_logprobs_diff
    return torch.stack([x, x.square() / 2, torch.expm1(-x) + x, ratio * x])
"""
OPEN_INSTRUCT = """
from open_instruct import model_utils


def compute_grpo_loss(new_logprobs, ratio, ref_logprobs, config):
    ref_logprobs_diff = (new_logprobs - ref_logprobs).clamp(-40.0, 40.0)
    kl_all = model_utils.estimate_kl(ref_logprobs_diff, ratio)
    kl = kl_all[config.kl_estimator]
    return kl
"""


def open_instructs(package, monkeypatch):
    """Its two modules, with what klfast knows of the first."""
    modules = package(
        {
            "open_instruct.model_utils": OPEN_INSTRUCT_UTILS,
            "open_instruct.grpo_utils": OPEN_INSTRUCT,
        }
    )
    monkeypatch.setitem(TARGETS, "open_instruct", retargeted("open_instruct", modules[0]))
    return modules


@pytest.mark.parametrize("mode", range(4))
def test_open_instructs_loss_makes_the_one_estimator_that_it_takes(package, monkeypatch, mode):
    utils, grpo = open_instructs(package, monkeypatch)
    logprobs, ref_logprobs, old_logprobs, _ = log_probs()
    ref_logprobs[0, 0] = 60  # beyond the limit, where the ratio keeps its gradient

    def differentiated():
        leaf = logprobs.clone().requires_grad_()
        config = SimpleNamespace(kl_estimator=mode)
        kl = grpo.compute_grpo_loss(leaf, (leaf - old_logprobs).exp(), ref_logprobs, config)
        return kl.detach(), torch.autograd.grad(kl.sum(), leaf)[0]

    theirs = differentiated()
    with patch("open_instruct") as made:
        assert made.replaced[0].where == "open_instruct.grpo_utils:compute_grpo_loss"
        utils.estimate_kl = None  # nobody calls it
        ours = differentiated()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert (theirs[1][0, 0] == 0) == (mode != 3)


def test_open_instructs_loss_with_other_estimators_is_left_alone(package, monkeypatch):
    utils, grpo = open_instructs(package, monkeypatch)
    before = grpo.compute_grpo_loss
    other = OPEN_INSTRUCT_UTILS.replace("x.square() / 2", "x.abs()")
    (utils,) = package({"open_instruct.other_utils": other})
    sys.modules["open_instruct.model_utils"].estimate_kl = utils.estimate_kl
    with pytest.raises(PatchError, match="estimate_kl: its code is none of those"):
        patch("open_instruct")
    assert grpo.compute_grpo_loss is before


def test_strict_takes_a_release_of_open_instruct_whose_loss_is_elsewhere(package, monkeypatch):
    """v0.1.0, of whose functions klfast knows all."""
    open_instructs(package, monkeypatch)
    del sys.modules["open_instruct.grpo_utils"].compute_grpo_loss
    utils = sys.modules["open_instruct.model_utils"]
    (target,) = TARGETS["open_instruct"]
    code = fingerprint(utils.estimate_kl)
    of_utils = known("open_instruct.model_utils:estimate_kl", code, open_instruct.estimate_kl, "1")
    groups = ((of_utils,), target.groups[1])
    monkeypatch.setitem(TARGETS, "open_instruct", (target._replace(groups=groups),))
    with patch("open_instruct", strict=True) as made:
        assert [each.where for each in made.replaced] == [of_utils.where]
        assert made.left[0].reason == (
            "the installed open_instruct has none (as open-instruct v0.1.0, whose loss is "
            "elsewhere)"
        )


# Calls


CALLS = {
    "skyrl": (
        skyrl.compute_approx_kl,
        {"log_probs": ..., "log_probs_base": ..., "loss_mask": None, "kl_estimator_type": "k3"},
    ),
    "skyrl-reward": (skyrl.apply_reward_kl_penalty, {"self": ..., "data": ...}),
    "skyrl-controller": (skyrl.get_kl_controller, {"algorithm_cfg": ...}),
    "skyrl-logprobs": (
        skyrl.logprobs_from_logits,
        {"logits": ..., "labels": ..., "inplace_backward": True},
    ),
    "skyrl-entropy": (
        skyrl.chunked_entropy_from_logits,
        {"logits": ..., "requires_grad": False, "attention_mask": None, "chunk_size": 1024},
    ),
    "nemo-rl": (
        nemo_rl.calculate_kl,
        {
            "logprobs": ...,
            "logprobs_reference": ...,
            "kl_type": "k3",
            "input_clamp_value": 20.0,
            "output_clamp_value": 10.0,
            "importance_sampling_weights": None,
        },
    ),
    "slime": (
        slime.compute_approx_kl,
        {"log_probs": ..., "log_probs_base": ..., "kl_loss_type": ..., "importance_ratio": None},
    ),
    "areal": (areal.KLEstimator, {"kl_estimator": "k1", "apply_clamp": True}),
    "areal-static": (
        areal.KLEstimator._compute_approx_kl,
        {"log_probs": ..., "log_probs_base": ..., "kl_estimator": "k1", "apply_clamp": True},
    ),
    "areal-logprobs": (
        areal.gather_logprobs,
        {"logits": ..., "labels": ..., "temperature": 1.0, "tp_group": None, "chunk_size": 1024},
    ),
    "open-instruct": (open_instruct.estimate_kl, {"ref_logprobs_diff": ..., "ratio": ...}),
    "open-instruct-logprobs": (open_instruct.log_softmax_and_gather, {"logits": ..., "index": ...}),
}


@pytest.mark.parametrize(("function", "expected"), CALLS.values(), ids=CALLS)
def test_arguments_have_the_frameworks_names_order_and_defaults(function, expected):
    parameters = inspect.signature(function).parameters.values()
    positional = {
        p.name: ... if p.default is p.empty else p.default
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    }
    assert positional == expected
    assert list(positional) == list(expected)


def test_areals_estimator_keeps_its_settings_as_attributes():
    estimator = areal.KLEstimator("k2", apply_clamp=False)
    assert (estimator.kl_estimator, estimator.apply_clamp) == ("k2", False)


NEXT = ["areal", "ms_swift", "nemo_rl", "open_instruct", "skyrl", "slime"]


@pytest.mark.parametrize("name", NEXT)
def test_a_framework_that_is_not_installed_is_said_to_be(name):
    if importlib.util.find_spec(TARGETS[name][0].packages[0]) is not None:
        pytest.skip("it is installed")
    with pytest.raises(PatchError, match=f"{name} is not installed"):
        patch(name)
    with pytest.raises(PatchError, match=f"{name} is not patched"):
        unpatch(name)


@pytest.mark.parametrize("name", NEXT)
def test_other_code_than_theirs_is_left_alone(package, name):
    """Functions of the same names, whose fingerprints are not the frameworks'."""
    sites = {site.where for target in TARGETS[name] for group in target.groups for site in group}
    modules = {}
    for where in sorted(sites):
        module, _, path = where.partition(":")
        head, _, method = path.partition(".")
        body = f"class {head}:\n    def {method or '__init__'}(self):\n        return 1\n"
        if not method and not head.endswith(("Estimator", "Controller")):
            body = f"def {head}(*args):\n    return 1\n"
        modules.setdefault(module, []).append(body)
    package({module: "\n\n".join(bodies) for module, bodies in modules.items()})
    with pytest.raises(PatchError, match=f"nothing of {name} is known to klfast, which knows"):
        patch(name)


GKD_LOSS = """
class TeacherOutput:
    def select(self, mask):
        return self


def extract_active(student_logits, teacher_output, labels):
    return student_logits


def jsd_loss(s_logits, t_logits, beta):
    return 7.0


def _align_vocab(*logits):
    return logits


def default_kl_div(*log_probs):
    return log_probs


def default_gather(logits, indices):
    return logits


def default_log_softmax(logits):
    return logits


def gkd_loss(*args):
    return 7.0, 2
"""
GKD_TRAINER = """
import torch
from swift.rlhf_trainers.gkd_loss import gkd_loss


class GKDTrainer:
    beta, temperature = 0.5, 1.0

    def _compute_jsd_loss(self, student_logits, teacher_output, labels):
        shifted_labels = torch.roll(labels, shifts=-1, dims=1)
        teacher_output.labels = torch.roll(teacher_output.labels, shifts=-1, dims=1)
        total, num_valid = gkd_loss(
            student_logits, teacher_output, shifted_labels, self.beta, self.temperature
        )
        return total / num_valid
"""


def swifts_distillation(package, monkeypatch):
    """(gkd_loss.py, gkd_trainer.py), with what klfast knows of the first."""
    loss, trainer = package(
        {
            "swift.rlhf_trainers.gkd_loss": GKD_LOSS,
            "swift.rlhf_trainers.gkd_trainer": GKD_TRAINER,
        }
    )
    monkeypatch.setitem(TARGETS, "ms_swift", retargeted("ms_swift", loss))
    return loss, trainer


def test_ms_swifts_distillation_loss_is_replaced_in_its_trainer(package, monkeypatch):
    """Not where Megatron's trainer calls it, with vocabularies in shards."""
    _, trainer = swifts_distillation(package, monkeypatch)
    logits, teacher_logits = torch.randn(2, 2, 3, 11, dtype=torch.float64)
    labels = torch.tensor([[-100, 3, 4], [-100, -100, 9]])

    def loss():
        teacher = SimpleNamespace(
            labels=labels.clone(), full_logits=teacher_logits, topk_logprobs=None, topk_indices=None
        )
        return trainer.GKDTrainer()._compute_jsd_loss(logits, teacher, labels)

    assert loss() == 3.5
    with patch("ms_swift"):
        ours = loss()
    keep = labels.roll(-1, dims=1) != -100
    p, q = teacher_logits.log_softmax(-1), logits.log_softmax(-1)
    m = (0.5 * p.exp() + 0.5 * q.exp()).log()
    jsd = 0.5 * (p.exp() * (p - m)).sum(-1) + 0.5 * (q.exp() * (q - m)).sum(-1)
    torch.testing.assert_close(ours, jsd[keep].mean())
    assert loss() == 3.5


@pytest.mark.parametrize(
    "name", ["gkd_loss", "extract_active", "jsd_loss", "TeacherOutput.select", "default_gather"]
)
def test_ms_swifts_distillation_with_another_callee_is_left_alone(package, monkeypatch, name):
    """In 4.3 ``extract_active`` reads an attribute that klfast does not know."""
    loss, trainer = swifts_distillation(package, monkeypatch)
    before = vars(trainer.GKDTrainer)["_compute_jsd_loss"]
    owner, _, last = name.rpartition(".")
    setattr(getattr(loss, owner) if owner else loss, last, lambda *args: args)
    with pytest.raises(PatchError, match=f"gkd_loss:{name}: its code is none of those"):
        patch_its_distillation(monkeypatch)
    assert vars(trainer.GKDTrainer)["_compute_jsd_loss"] is before


def patch_its_distillation(monkeypatch):
    """``patch("ms_swift")`` of that group alone, so that the error names the callee."""
    (target,) = TARGETS["ms_swift"]
    groups = tuple(group for group in target.groups if "GKDTrainer" in group[0].where)
    monkeypatch.setitem(TARGETS, "ms_swift", (target._replace(groups=groups),))
    patch("ms_swift")


def test_ms_swifts_loss_of_no_tokens_has_a_gradient():
    """As ``jsd_loss`` has since 4.6, and without harm to the releases before it."""
    logits = torch.randn(1, 3, 5, requires_grad=True)
    labels = torch.full((1, 3), -100)
    teacher = SimpleNamespace(
        full_logits=torch.randn(1, 3, 5), topk_logprobs=None, topk_indices=None, labels=labels
    )
    total, count = ms_swift.gkd_loss(logits, teacher, labels, 0.5, 1.0)
    total.backward()
    assert (total.item(), count.item()) == (0, 0)
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("error", ["ModuleNotFoundError", "OSError"])
def test_strict_does_without_megatron_but_not_with_a_broken_one(package, monkeypatch, error):
    package(
        {
            "swift.rlhf_trainers.grpo_trainer": SWIFT.format(decorator=NOT_DECORATED).replace(
                "from swift.rlhf_trainers.utils import profiling_decorator", ""
            ),
            "swift.megatron.trainers.nothing": "",
        }
    )
    name = ", name='megatron'" if error == "ModuleNotFoundError" else ""
    folder = Path(sys.modules["swift.megatron.trainers"].__file__).parent
    (folder / "grpo_trainer.py").write_text(f"raise {error}('no'{name})")
    (target,) = TARGETS["ms_swift"]
    groups = tuple(group for group in target.groups if "GRPOTrainer" in group[0].where)
    monkeypatch.setitem(TARGETS, "ms_swift", (target._replace(groups=groups),))
    if error == "OSError":
        with pytest.raises(PatchError, match=r"not all of ms_swift is known.*OSError"):
            patch("ms_swift", strict=True)
        return
    with patch("ms_swift", strict=True) as made:
        assert len(made.replaced) == len(made.left) == 2
        assert {each.reason for each in made.left} == {
            "importing swift.megatron.trainers.grpo_trainer failed, for want of megatron "
            "(as without Megatron)"
        }


# Where there is a GPU


# torch's own, when dynamo is imported first
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"
)
def test_slime_s_one_function_is_left_alone_on_a_gpu_and_said_to_be(package, monkeypatch):
    """No error: it is known, and compiled."""
    source = """
import torch


@torch.compile
def compute_approx_kl(log_probs, log_probs_base, kl_loss_type, importance_ratio=None):
    return log_probs
"""
    (module,) = package({"slime.utils.ppo_utils": source})
    code = fingerprint(module.compute_approx_kl._torchdynamo_orig_callable)
    where = "slime.utils.ppo_utils:compute_approx_kl"
    site = known_compiled(where, code, slime.compute_approx_kl, "1")
    (target,) = TARGETS["slime"]
    monkeypatch.setitem(TARGETS, "slime", (target._replace(groups=((site,),)),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = module.compute_approx_kl
    with patch("slime", strict=True) as made:
        assert made.replaced == ()
        assert made.left == (
            Left(
                where,
                "on a GPU it runs under torch.compile; no measurement shows klfast to be faster",
            ),
        )
        assert module.compute_approx_kl is before


def test_a_flash_attn_without_a_spec_is_there(monkeypatch):
    """As others' tests put one into ``sys.modules``; None there blocks an import."""
    fused = next(
        form.fused
        for group in TARGETS["openrlhf"][0].groups
        for site in group
        for form in site.forms
        if site.where.endswith(":log_probs_from_logits")
    )
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert fused(sys) == (
        "on a GPU it calls flash-attn's cross entropy; no measurement shows klfast to be faster"
    )
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert fused(sys) is None
