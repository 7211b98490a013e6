# %% [markdown]
# # Validation accuracy at different target quantiles
# Files of the same: `python -m groupwise.analysis.figures target_quantile`.

# %%
from IPython.display import Image

from groupwise.analysis.figure_style import content
from groupwise.analysis.figures import make
from groupwise.analysis.results import Folders

drawn = make("target_quantile", Folders.of_checkout())
Image(content(drawn.figure, "png"), width=720)

# %% [markdown]
# The runs behind it: one row each.

# %%
drawn.runs.rows[["cell", "seed", "scale", "hash", "git.sha"]]
