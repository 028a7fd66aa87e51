"""The formula at the head of a function's or a class's page: name -> LaTeX."""

_ERROR = r"e = \operatorname{clip}\!\left(\frac{\mathrm{KL}}{\mathrm{target}} - 1,\ \pm 10\right)"

FORMULAS = {
    "kl_penalty": (
        r"x_t = \log \pi(a_t) - \log \pi_{\mathrm{ref}}(a_t), \qquad"
        r" \mathrm{token\text{-}mean} = \beta\, "
        r"\frac{\sum_t m_t\, f(x_t)}{\sum_t m_t}, \qquad k_3(x) = e^{-x} - 1 + x"
    ),
    "kl_rewards": (
        r"r_t = -\beta\, f(x_t) + \mathrm{score}\cdot[\,t\ \text{is the last kept token}\,]"
    ),
    "kl_divergence": (
        r"\mathrm{KL}(p \,\|\, q) = \sum_v p_v \log \frac{p_v}{q_v}, \qquad"
        r" p = \operatorname{softmax}(z / T),\quad q = \operatorname{softmax}(z_{\mathrm{ref}} / T)"
    ),
    "token_logprobs": (
        r"\log p_k = \frac{z_k}{T} - \log \sum_v e^{z_v / T}, \qquad H = -\sum_v p_v \log p_v"
    ),
    "rollout_correction": (
        r"x_t = \log \pi(a_t) - \log \pi_{\mathrm{rollout}}(a_t), \qquad"
        r" w_t = \min\!\left(\max\!\left(e^{x_t}, \mathrm{floor}\right), \mathrm{cap}\right)"
    ),
    "AdaptiveKLController": (
        r"\beta \leftarrow \beta \left(1 + \operatorname{clip}\!\left("
        r"\frac{\mathrm{KL}}{\mathrm{target}} - 1,\ \pm c\right) \frac{n}{\mathrm{horizon}}\right)"
    ),
    "ExponentialKLController": r"\beta \leftarrow \beta\, e^{\,g\,(\mathrm{KL} - \mathrm{target})}",
    "NuPIKLController": (
        r"\beta \leftarrow \beta\, e^{\,k_i e + k_p (\xi - \xi')}, \qquad"
        rf" \xi = \nu \xi' + (1 - \nu)\, e, \qquad {_ERROR}"
    ),
    "PIDLagrangianKLController": rf"\beta = k_p P + I + k_d \max(0, D), \qquad {_ERROR}",
    "DualKLController": rf"\beta \leftarrow \beta\, e^{{\,\eta e}}, \qquad {_ERROR}",
    "DoublingKLController": (
        r"\beta \leftarrow 2 \beta\ \text{if}\ \mathrm{KL} > 1.5\,\mathrm{target}, \qquad"
        r" \beta \leftarrow \beta / 2\ \text{if}\ \mathrm{KL} < \mathrm{target} / 1.5"
    ),
    "ControlVAEKLController": rf"\beta = \frac{{k_p}}{{1 + e^{{-e}}}} + I, \qquad {_ERROR}",
}
