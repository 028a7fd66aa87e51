"""A Llama of 17,000 parameters and its tokenizer, made here without a download.

Use the folder that ``save`` writes as the path of a model. ``trl_grpo.py`` trains this model, and
so do klfast's tests against TRL.
"""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<unk>")
WORDS = tuple(f"w{number}" for number in range(13))


def tokenizer():
    """A token per word. One sampled token in sixteen ends a completion, so lengths differ."""
    words = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    split = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, eos, unk = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token=pad, eos_token=eos, unk_token=unk, padding_side="left"
    )


def save(folder):
    """Write the model, whose weights are random and always the same, and its tokenizer."""
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,  # the default gives almost uniform probabilities
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
