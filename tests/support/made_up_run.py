"""Records of the experiment with chosen numbers."""

from lab.train import SAMPLED


def rows(name, kl, coefficient=0.1, perplexity=20.0, reward=0.1):
    """An arm with this KL at each step; ``reward`` is a number, or one for each step."""
    rewards = reward if isinstance(reward, list) else [reward] * len(kl)
    return [
        {
            "arm": name,
            "step": i + 1,
            "reward": rewards[i],
            "coefficient": coefficient,
            "kl_per_sequence_exact": 1.1 * value,
            **{f"kl_per_sequence_{name}": value for name in SAMPLED},
            **{f"kl_per_sequence_{name}_error_std": value / 2 for name in SAMPLED},
            "kl_per_token_k3": value / 32,
            "held_out_perplexity": perplexity,
            "mean_length": 20.0,
            "clipped": 24,
            "nonfinite": i,
            "kl_step_seconds": 0.001,
            "step_seconds": 0.1,
        }
        for i, value in enumerate(kl)
    ]
