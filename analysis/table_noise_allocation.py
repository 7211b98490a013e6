# %% [markdown]
# # Three ways to share the noise among layers
# Appendix: RoBERTa-base on SST-2.
# Files of the same: `python -m groupwise.analysis.tables noise_allocation`.

# %%
from IPython.display import Markdown

from groupwise.analysis.results import Folders
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import table_page

folders = Folders.of_checkout()
Markdown(table_page("noise_allocation", folders))

# %% [markdown]
# The same lines as data: one a number of the paper.

# %%
table_lines("noise_allocation", folders)
