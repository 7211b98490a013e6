# %% [markdown]
# # Fixed per-layer clipping against flat clipping
# Table 1: CIFAR-10 and SST-2.
# Files of the same: `python -m groupwise.analysis.tables fixed_per_layer`.

# %%
from IPython.display import Markdown

from groupwise.analysis.results import Folders
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import table_page

folders = Folders.of_checkout()
Markdown(table_page("fixed_per_layer", folders))

# %% [markdown]
# The same lines as data: one a number of the paper.

# %%
table_lines("fixed_per_layer", folders)
