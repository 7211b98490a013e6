# %% [markdown]
# # GLUE: adaptive per-layer clipping beside the literature
# Table 3: RoBERTa-base and RoBERTa-large on four tasks; the literature's rows are quoted.
# Files of the same: `python -m groupwise.analysis.tables glue`.

# %%
from IPython.display import Markdown

from groupwise.analysis.results import Folders
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import table_page

folders = Folders.of_checkout()
Markdown(table_page("glue", folders))

# %% [markdown]
# The same lines as data: one a number of the paper.

# %%
table_lines("glue", folders)
