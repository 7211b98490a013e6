# %% [markdown]
# # Memory and throughput against batch size
# Files of the same: `python -m groupwise.analysis.figures throughput`.

# %%
from IPython.display import Image

from groupwise.analysis.figure_style import content
from groupwise.analysis.figures import make
from groupwise.analysis.results import Folders

drawn = make("throughput", Folders.of_checkout())
Image(content(drawn.figure, "png"), width=720)
