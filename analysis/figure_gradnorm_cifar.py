# %% [markdown]
# # Per-layer gradient norms shift during training: CIFAR-10, one row an example, one column a layer
# Files of the same: `python -m groupwise.analysis.figures gradnorm_cifar`.

# %%
from IPython.display import Image

from groupwise.analysis.figure_style import content
from groupwise.analysis.figures import make
from groupwise.analysis.results import Folders

drawn = make("gradnorm_cifar", Folders.of_checkout())
Image(content(drawn.figure, "png"), width=720)

# %% [markdown]
# The runs behind it: one row each.

# %%
drawn.runs.rows[["cell", "seed", "scale", "hash", "git.sha"]]
