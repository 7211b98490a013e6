"""Scores of generated texts against references: BLEU and ROUGE, by sacrebleu and rouge-score."""

from groupwise.metrics.bleu import corpus_bleu
from groupwise.metrics.rouge import e2e_rouge_l, rouge

__all__ = ["corpus_bleu", "e2e_rouge_l", "rouge"]
