# %% [markdown]
# # CIFAR-10: adaptive per-layer against flat clipping
# Table 2: WRN16-4 at four budgets.
# Files of the same: `python -m groupwise.analysis.tables cifar`.

# %%
from IPython.display import Markdown

from groupwise.analysis.results import Folders
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import table_page

folders = Folders.of_checkout()
Markdown(table_page("cifar", folders))

# %% [markdown]
# The same lines as data: one a number of the paper.

# %%
table_lines("cifar", folders)
