# %% [markdown]
# # Test loss against wall time: GPT-2 on E2E
# Files of the same: `python -m groupwise.analysis.figures runtime_nll`.

# %%
from IPython.display import Image

from groupwise.analysis.figure_style import content
from groupwise.analysis.figures import make
from groupwise.analysis.results import Folders

drawn = make("runtime_nll", Folders.of_checkout())
Image(content(drawn.figure, "png"), width=720)

# %% [markdown]
# The runs behind it: one row each.

# %%
drawn.runs.rows[["cell", "seed", "scale", "hash", "git.sha"]]
