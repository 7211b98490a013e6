# %% [markdown]
# # Memory and throughput on another machine configuration
# Files of the same: `python -m groupwise.analysis.figures runtime_breakdown`.

# %%
from IPython.display import Image

from groupwise.analysis.figure_style import content
from groupwise.analysis.figures import make
from groupwise.analysis.results import Folders

drawn = make("runtime_breakdown", Folders.of_checkout())
Image(content(drawn.figure, "png"), width=720)
