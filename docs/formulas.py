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
    "topk_kl_divergence": (
        r"\mathrm{KL}_{\mathrm{bucket}}(p \,\|\, q) = \sum_{k=1}^{K} p_k \log \frac{p_k}{q_k}"
        r" + (1 - P) \log \frac{1 - P}{1 - Q}, \qquad P = \sum_k p_k,\quad Q = \sum_k q_k"
    ),
    "linear_topk_kl_divergence": (
        r"\mathrm{KL}_{\mathrm{bucket}}(p \,\|\, q), \qquad q = \operatorname{softmax}(z / T),\quad"
        r" z = \operatorname{softcap}(W h + b)"
    ),
    "linear_token_logprobs": (
        r"z = \operatorname{softcap}(W h + b), \qquad"
        r" \log p_k = \frac{z_k}{T} - \log \sum_v e^{z_v / T}"
    ),
    "linear_token_loss": (
        r"\mathrm{token\text{-}mean} = \frac{\sum_t m_t\, \ell(\log p_{t,a_t}, \dots)}"
        r"{\sum_t m_t}, \qquad p = \operatorname{softmax}(z / T),\quad"
        r" z = \operatorname{softcap}(W h + b)"
    ),
    "linear_kl_divergence": (
        r"\mathrm{KL}(p \,\|\, q), \qquad p = \operatorname{softmax}(z / T),\quad"
        r" q = \operatorname{softmax}(z_{\mathrm{ref}} / T),\quad"
        r" z = \operatorname{softcap}(W h + b)"
    ),
    "reduce": (
        r"\mathrm{token\text{-}mean} = c\, \frac{\sum_t m_t\, v_t}{\sum_t m_t}, \qquad"
        r" \mathrm{seq\text{-}mean\text{-}token\text{-}mean} ="
        r" \frac{c}{S} \sum_s \frac{\sum_{t \in s} m_t\, v_t}{\sum_{t \in s} m_t}"
    ),
    "worst_tokens": (
        r"\operatorname{top\text{-}k}_t\, |x_t|, \qquad"
        r" x_t = \log \pi(a_t) - \log \pi_{\mathrm{ref}}(a_t)"
    ),
    "token_logprobs": (
        r"\log p_k = \frac{z_k}{T} - \log \sum_v e^{z_v / T}, \qquad H = -\sum_v p_v \log p_v"
    ),
    "rollout_correction": (
        r"x_t = \log \pi(a_t) - \log \pi_{\mathrm{rollout}}(a_t), \qquad"
        r" w_t = \min\!\left(\max\!\left(e^{x_t}, \mathrm{floor}\right), \mathrm{cap}\right)"
    ),
    "KLPenalty": (
        r"x_t = \log \pi(a_t) - \log \pi_{\mathrm{ref}}(a_t), \qquad"
        r" \mathrm{loss} = \beta\, \frac{\sum_t m_t\, f(x_t)}{\sum_t m_t}, \qquad"
        r" \beta \leftarrow \mathrm{rule}(\beta, \mathrm{KL})\ \text{once a step}"
    ),
    "Estimator": (
        r"w_t\, f(x_t), \qquad x_t = \log \pi(a_t) - \log \pi_{\mathrm{ref}}(a_t), \qquad"
        r" w_t = \frac{\pi(a_t)}{\pi_{\mathrm{old}}(a_t)}"
    ),
    "data_parallel_normalizer": (
        r"\mathrm{normalizer} = \frac{D}{W}, \qquad D = \sum_{r=1}^{W} D_r, \qquad"
        r" \frac{1}{W} \sum_r \frac{S_r}{D / W} = \frac{\sum_r S_r}{D}"
    ),
    "log_ratio_profile": (
        r"x_t = \log \pi(a_t) - \log \pi_{\mathrm{ref}}(a_t), \qquad"
        r" \mathrm{bucket}(t) = 1 + \lfloor \log_2 t \rfloor,\quad \mathrm{bucket}(0) = 0"
    ),
    "Rejection": (
        r"\text{kept:}\quad \mathrm{low} \le s(x) \le \mathrm{high}, \qquad"
        r" x_t = \log \pi(a_t) - \log \pi_{\mathrm{rollout}}(a_t)"
    ),
    "ScheduledKLController": (
        r"\beta = \beta_0\, c(t), \qquad c_{\mathrm{linear}} = 1 + (\mathrm{final} - 1)\, s,"
        r" \qquad s = \frac{t - \mathrm{warmup}}{\mathrm{steps}}"
    ),
    "KLMonitor": (
        r"\text{high:}\ m > \mathrm{high} \cdot \mathrm{target}, \qquad"
        r" \text{low:}\ m < \mathrm{low} \cdot \mathrm{target}, \qquad"
        r" m = \frac{1}{n} \sum_{i=1}^{n} \mathrm{KL}_i"
    ),
    "KLEarlyStop": r"\text{stop:}\ \mathrm{KL} > \mathrm{factor} \cdot \mathrm{target}",
    "KLAdaptiveLR": (
        r"\eta \leftarrow \eta / \mathrm{factor}\ \text{if}\ \mathrm{KL} > \mathrm{high} \cdot"
        r" \mathrm{target}, \qquad \eta \leftarrow \eta \cdot \mathrm{factor}\ \text{if}\ 0 <"
        r" \mathrm{KL} < \mathrm{low} \cdot \mathrm{target}"
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
