"""patch() of the distillation losses: where the targets look, in packages made up of those places.

The code there is not the frameworks', so each site is given the made-up code's fingerprint;
tests/peers has the real ones.
"""

import importlib
import inspect
from types import SimpleNamespace

import packages
import pytest
import torch

from klfast.compat import PatchError, roll, trl
from klfast.compat.patching.fingerprints import fingerprint
from klfast.compat.patching.sites import Site
from klfast.compat.targets import TARGETS

GKD_TRAINER = """
class GKDTrainer:
    @staticmethod
    def generalized_jsd_loss(
        student_logits, teacher_logits, labels=None, beta=0.5, temperature=1.0,
        reduction="batchmean", num_items_in_batch=None,
    ):
        return "theirs"

    def compute_loss(self, student, teacher, labels, num_items_in_batch=None):
        return self.generalized_jsd_loss(
            student_logits=student, teacher_logits=teacher, labels=labels, beta=0.9,
            num_items_in_batch=num_items_in_batch,
        )


class Child(GKDTrainer):
    pass
"""
LOSS_UTILS = """
def compute_divergence(student_log_probs, teacher_log_probs, alpha):
    return "theirs"


def compute_full_logit_self_distillation_loss(
    student_logits, teacher_logits, *, distillation_alpha
):
    return "theirs"


def add_tail_bucket(log_probs):
    return "theirs"


def compute_topk_self_distillation_loss(
    student_logits, teacher_logits, *, distillation_topk, distillation_alpha, distillation_add_tail
):
    return "theirs"
"""
TRAINER = """
from .loss_utils import (
    add_tail_bucket,
    compute_divergence,
    compute_full_logit_self_distillation_loss,
    compute_topk_self_distillation_loss,
)
"""
IW_OPD = """
def _add_tail_bucket(log_probs, valid_mask):
    return "theirs"


def _jsd_divergence(student_log_probs, teacher_log_probs, beta, support_mask=None):
    return "theirs"


class IWOPDTrainer:
    @staticmethod
    def _reduce_divergence_loss(jsd):
        return "theirs"

    @staticmethod
    def generalized_jsd_loss(student_logits, teacher_logits, top_k=0):
        return "theirs"
"""
VARIOUS_DIVERGENCE = """
class VariousDivergence:
    def __init__(self, pipeline_config, padding_id=-100):
        self.kd_temperature = pipeline_config.kd_temperature
        self.dist_func = getattr(self, f"compute_{pipeline_config.kd_objective}_divergence")

    def __call__(self, logits, teacher_probs, teacher_log_probs, teacher_inf_mask):
        return self.dist_func(logits, teacher_probs, teacher_log_probs, teacher_inf_mask)
"""
for _name in ("forward_kl", "reverse_kl", "js", "skewed_forward_kl"):
    VARIOUS_DIVERGENCE += f"""
    def compute_{_name}_divergence(
        self, logits, teacher_probs, teacher_log_probs, teacher_inf_mask
    ):
        return "theirs, {_name}"
"""
MODULES = {
    "trl": {
        "trl.experimental.gkd.gkd_trainer": GKD_TRAINER,
        "trl.experimental.sdft.loss_utils": LOSS_UTILS,
        "trl.experimental.sdft.sdft_trainer": TRAINER,
        "trl.experimental.sdpo.loss_utils": LOSS_UTILS,
        "trl.experimental.sdpo.sdpo_trainer": TRAINER,
        "trl.experimental.iw_opd.iw_opd_trainer": IW_OPD,
    },
    "roll": {"roll.pipeline.distill.various_divergence": VARIOUS_DIVERGENCE},
}


@pytest.fixture
def made_up(package):
    """Makes a framework's modules; (them by name, the target of their sites alone)."""

    def make(framework):
        modules = dict(zip(MODULES[framework], package(MODULES[framework]), strict=True))
        groups = [
            tuple(_recognising(site, modules) for site in group)
            for group in TARGETS[framework][0]
            if group[0].where.partition(":")[0] in modules
        ]
        return modules, groups

    return make


def _recognising(site, modules):
    """The site with the fingerprint of the made-up code."""
    module, _, path = site.where.partition(":")
    found = modules[module]
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    (releases,) = site.codes.values()
    return site._replace(codes={fingerprint(found): releases})


def test_gkd_trainers_take_klfast_s_loss(made_up):
    modules, target = made_up("trl")
    module = modules["trl.experimental.gkd.gkd_trainer"]
    before = vars(module.GKDTrainer)["generalized_jsd_loss"]
    student, teacher = torch.randn(2, 2, 3, 7)
    labels = torch.tensor([[1, -100, 1], [-100, 1, 1]])
    with packages.apply("trl", target):
        for trainer in (module.GKDTrainer(), module.Child()):
            loss = trainer.compute_loss(student, teacher, labels, 5)
            expected = trl.generalized_jsd_loss(student, teacher, labels, 0.9, num_items_in_batch=5)
            assert torch.equal(loss, expected)
        bare = module.GKDTrainer.generalized_jsd_loss(student, teacher)
        assert torch.equal(bare, trl.generalized_jsd_loss(student, teacher))
        names = inspect.signature(module.GKDTrainer.generalized_jsd_loss).parameters
        assert [*names] == [*inspect.signature(trl.generalized_jsd_loss).parameters]
    assert vars(module.GKDTrainer)["generalized_jsd_loss"] is before
    assert module.Child().compute_loss(student, teacher, labels) == "theirs"


@pytest.mark.parametrize("of", ["sdft", "sdpo"])
def test_self_distillation_s_trainers_take_klfast_s_losses(made_up, of):
    modules, target = made_up("trl")
    trainer = modules[f"trl.experimental.{of}.{of}_trainer"]
    student, teacher = torch.randn(2, 2, 3, 7).log_softmax(-1)
    with packages.apply("trl", target):
        value = trainer.compute_divergence(student, teacher, 0.3)
        assert torch.equal(value, trl.compute_divergence(student, teacher, 0.3))
        full = trainer.compute_full_logit_self_distillation_loss
        value = full(student, teacher, distillation_alpha=1.0)
        expected = trl.compute_full_logit_self_distillation_loss
        assert torch.equal(value, expected(student, teacher, distillation_alpha=1.0))
        options = {"distillation_topk": 2, "distillation_add_tail": True, "distillation_alpha": 1.0}
        value = trainer.compute_topk_self_distillation_loss(student, teacher, **options)
        expected = trl.compute_topk_self_distillation_loss
        assert torch.equal(value, expected(student, teacher, **options))
        few = student[..., :2]
        assert torch.equal(trainer.add_tail_bucket(few), trl.add_tail_bucket(few))
    assert trainer.compute_divergence(student, teacher, 0.3) == "theirs"


@pytest.mark.parametrize("changed", [None, "_jsd_divergence", "_add_tail_bucket"])
def test_iw_opd_takes_klfast_s_loss_where_its_callees_are_known(made_up, monkeypatch, changed):
    modules, target = made_up("trl")
    module = modules["trl.experimental.iw_opd.iw_opd_trainer"]
    if changed:
        monkeypatch.setattr(module, changed, lambda *args: "another's")
    student, teacher = torch.randn(2, 2, 3, 7)
    with packages.apply("trl", target):
        value = module.IWOPDTrainer.generalized_jsd_loss(student, teacher, top_k=2)
        if changed:
            assert value == "theirs"
        else:
            expected = trl.iw_opd_generalized_jsd_loss(student, teacher, top_k=2)
            assert torch.equal(value, expected)
        few = student.log_softmax(-1)[..., :2]
        found = module._add_tail_bucket(few, few > -1)
        if changed == "_add_tail_bucket":
            assert found == "another's"
        else:
            for mine, expected in zip(
                found, trl.add_tail_bucket_and_mask(few, few > -1), strict=True
            ):
                assert torch.equal(mine, expected)
    assert module.IWOPDTrainer().generalized_jsd_loss(student, teacher) == "theirs"


METHODS = {"forward_kl": "forward_kl", "reverse_kl": "reverse_kl", "js": "js_divergence"}


@pytest.mark.parametrize("objective", METHODS)
def test_roll_s_divergences_are_klfast_s_where_it_has_them(made_up, objective):
    modules, target = made_up("roll")
    module = modules["roll.pipeline.distill.various_divergence"]
    logits, logprobs = torch.randn(2, 4, 9)
    logprobs = logprobs.log_softmax(-1)
    given = (logits, logprobs.exp(), logprobs, logprobs.isinf())

    def divergence(cls, kd_objective):
        return cls(SimpleNamespace(kd_temperature=2.0, kd_objective=kd_objective))(*given)

    with packages.apply("roll", target):
        value = divergence(module.VariousDivergence, objective)
        assert torch.equal(value, divergence(roll.VariousDivergence, METHODS[objective]))
        skewed = divergence(module.VariousDivergence, "skewed_forward_kl")
        assert skewed == "theirs, skewed_forward_kl"
    assert divergence(module.VariousDivergence, objective) == f"theirs, {objective}"


@pytest.mark.parametrize(
    "change",
    [
        ("@staticmethod", "@classmethod"),
        ("    @staticmethod\n", ""),
        ('return "theirs"', 'return "others"'),
        ("beta=0.5", "beta=0.6"),
    ],
    ids=["classmethod", "method", "other code", "other default"],
)
def test_what_is_not_that_static_method_is_refused(made_up, change):
    modules, target = made_up("trl")
    packages.forget(["trl"])
    path = modules["trl.experimental.gkd.gkd_trainer"].__file__
    other = GKD_TRAINER.replace(*change) + "\n# longer, so that no cache of bytecode serves\n"
    with open(path, "w") as file:
        file.write(other)
    module = importlib.import_module("trl.experimental.gkd.gkd_trainer")
    before = dict(vars(module.GKDTrainer))
    gkd = [group for group in target if ".gkd." in group[0].where]
    with pytest.raises(PatchError, match="its code is none of those"):
        packages.apply("trl", gkd)
    assert dict(vars(module.GKDTrainer)) == before


def test_a_static_method_hears_of_exact(package):
    text = "class Owner:\n    @staticmethod\n    def loss(x):\n        return x\n"
    (module,) = package({"made_up_static": text})
    code = fingerprint(vars(module.Owner)["loss"])
    site = Site("made_up_static:Owner.loss", {code: "1.0"}, lambda x, *, exact=False: (x, exact))
    with packages.apply("made_up_static", ((site,),), exact=True):
        assert module.Owner.loss(3) == module.Owner().loss(3) == (3, True)
    assert module.Owner().loss(3) == 3
