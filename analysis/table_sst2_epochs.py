# %% [markdown]
# # SST-2 at a fixed number of epochs
# Table 4 (ε = 3) and its complement in the appendix (ε = 8): attention and head are trained.
# Files of the same: `python -m groupwise.analysis.tables sst2_epochs`.

# %%
from IPython.display import Markdown

from groupwise.analysis.results import Folders
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import table_page

folders = Folders.of_checkout()
Markdown(table_page("sst2_epochs", folders))

# %% [markdown]
# The same lines as data: one a number of the paper.

# %%
table_lines("sst2_epochs", folders)
