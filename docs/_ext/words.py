"""The tables of frameworks' names for estimators and reductions, made from klfast.compat."""

from klfast.args.estimator import Estimator
from klfast.compat import presets, roll, trl, verl

ESTIMATORS = (
    ("verl, `kl_penalty` and `kl_loss_type`", presets.VERL),
    ("OpenRLHF, `kl_estimator`", presets.OPENRLHF),
    ("ROLL, `kl_penalty`", presets.ROLL),
    (
        "TRL's GRPO, with `old_logprobs` under `use_bias_correction_kl` (on by default since 1.10)",
        {"(its KL)": presets.TRL_GRPO},
    ),
    ("TRL's RLOO", {"(its KL)": presets.TRL_RLOO}),
    ("TRL's PPO up to 0.11, `kl_penalty`", presets.TRL_PPO),
    ("trlx", presets.TRLX),
    ("SkyRL, `kl_estimator_type`", presets.SKYRL),
    ("NeMo-RL, `reference_policy_kl_type`", presets.NEMO_RL),
    ("slime, `--kl-loss-type`", presets.SLIME),
    ("AReaL, `kl_estimator`", presets.AREAL),
    ("labs-molt, `--algo.kl.estimator`", presets.LABS_MOLT),
    ("open-instruct, `kl_estimator`", presets.OPEN_INSTRUCT),
    ("ms-swift", presets.MS_SWIFT),
    ("Liger's GRPO", presets.LIGER),
    ("Megatron-LM's GRPO", presets.MEGATRON_LM),
)
REDUCTIONS = (
    ("verl, `loss_agg_mode`", verl.REDUCTIONS),
    ("TRL, `loss_type`", trl.REDUCTIONS),
    ("ROLL's distillation, `reduction`", roll.REDUCTIONS),
)


def text_of(estimator):
    """An estimator as it is written, with the options that are not left at their defaults."""
    names = ("gradient", "importance", "log_ratio_clip", "linear_tail", "kl_clip")
    names += ("clip_weighted", "importance_cap")
    plain = Estimator(estimator.name)
    options = {name: getattr(estimator, name) for name in names}
    given = {name: v for name, v in options.items() if v != getattr(plain, name)}
    if not given:
        return f'"{estimator.name}"'
    arguments = ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in given.items())
    return f'Estimator("{estimator.name}", {arguments})'


def table(heads, groups, show):
    """A Markdown table of frameworks' names, with those of one meaning in one line."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for title, words in groups:
        names = {}
        for word, meaning in words.items():
            names.setdefault(show(meaning), []).append(f"`{word}`")
        for meaning, same in names.items():
            lines.append(f"| {title} | {', '.join(same)} | `{meaning}` |")
            title = ""
    return "\n".join(lines)


def page():
    """The rest of docs/glossary.md."""
    estimators = table(("framework", "its name", "`estimator=`"), ESTIMATORS, text_of)
    reductions = table(("framework", "its name", "`reduction=`"), REDUCTIONS, '"{}"'.format)
    return f"## Estimators\n\n{estimators}\n\n## Reductions\n\n{reductions}\n"


if __name__ == "__main__":
    print(page())
