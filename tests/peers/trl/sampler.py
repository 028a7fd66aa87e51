"""A stand-in for TRL's connection to vLLM. It samples off the policy, and returns log-probs.

It has the attributes and the result of ``trl.generation.vllm_generation.VLLMGeneration``.
"""

import tiny
import torch


class OffPolicySampler:
    """Random completions, scored by the trainer's own model plus noise."""

    def __init__(self, trainer, noise=0.3, unscored=0.05):
        self.trainer = trainer
        self.noise = noise
        self.unscored = unscored
        self.logprobs = None
        self.generator = torch.Generator().manual_seed(5)

    def sync_weights(self):
        """Do nothing, because the model is the trainer's."""

    def generate(self, prompts, images=None, num_generations=1, profiler=None):
        completions = [self._completion() for _ in prompts]
        scores = [self._scores(*pair) for pair in zip(prompts, completions, strict=True)]
        logprobs = None if self.logprobs is None else [[[x] for x in row] for row in scores]
        return prompts, completions, logprobs, None

    def _completion(self):
        longest = self.trainer.max_completion_length
        length = int(torch.randint(1, longest + 1, (), generator=self.generator))
        words = torch.randint(
            len(tiny.SPECIAL),
            len(tiny.SPECIAL) + len(tiny.WORDS),
            (length,),
            generator=self.generator,
        )
        end = [] if length == longest else [self.trainer.processing_class.eos_token_id]
        return [*words.tolist()[: longest - len(end)], *end]

    @torch.no_grad()
    def _scores(self, prompt, completion):
        """Log-probs of the completion's tokens as another engine might have them, or None."""
        ids = torch.tensor([prompt + completion])
        logits = self.trainer.model(ids).logits[0, len(prompt) - 1 : -1] / self.trainer.temperature
        scores = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        scores = scores + self.noise * torch.randn(len(scores), generator=self.generator)
        lost = torch.rand(len(scores), generator=self.generator) < self.unscored
        return [
            None if gone else score
            for gone, score in zip(lost.tolist(), scores.tolist(), strict=True)
        ]


def sampling_off_policy(**options):
    """A ``configure=`` of ``tiny.train``: the trainer generates with an ``OffPolicySampler``."""

    def configure(trainer):
        asked = 0 if hasattr(trainer, "vllm_importance_sampling_mode") else None
        trainer.use_vllm = True
        trainer.vllm_generation = OffPolicySampler(trainer, **options)
        trainer.vllm_generation.logprobs = asked
        trainer._last_loaded_step = -1

    return configure
