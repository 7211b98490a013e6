# %% [markdown]
# # The distribution of per-layer gradient norms shifts during fine-tuning: SST-2
# Files of the same: `python -m groupwise.analysis.figures gradnorm_sst2`.

# %%
from IPython.display import Image

from groupwise.analysis.figure_style import content
from groupwise.analysis.figures import make
from groupwise.analysis.results import Folders

drawn = make("gradnorm_sst2", Folders.of_checkout())
Image(content(drawn.figure, "png"), width=720)

# %% [markdown]
# The runs behind it: one row each.

# %%
drawn.runs.rows[["cell", "seed", "scale", "hash", "git.sha"]]
