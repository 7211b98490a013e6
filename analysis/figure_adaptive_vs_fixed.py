# %% [markdown]
# # Adaptive per-layer clipping against fixed per-layer and flat clipping, with and without noise
# Files of the same: `python -m groupwise.analysis.figures adaptive_vs_fixed`.

# %%
from IPython.display import Image

from groupwise.analysis.figure_style import content
from groupwise.analysis.figures import make
from groupwise.analysis.results import Folders

drawn = make("adaptive_vs_fixed", Folders.of_checkout())
Image(content(drawn.figure, "png"), width=720)

# %% [markdown]
# The runs behind it: one row each.

# %%
drawn.runs.rows[["cell", "seed", "scale", "hash", "git.sha"]]
