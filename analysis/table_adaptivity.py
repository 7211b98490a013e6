# %% [markdown]
# # What adaptive thresholds gain, flat and per layer
# Appendix: CIFAR-10 and SST-2; a gain is the mean of paired differences.
# Files of the same: `python -m groupwise.analysis.tables adaptivity`.

# %%
from IPython.display import Markdown

from groupwise.analysis.results import Folders
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import table_page

folders = Folders.of_checkout()
Markdown(table_page("adaptivity", folders))

# %% [markdown]
# The same lines as data: one a number of the paper.

# %%
table_lines("adaptivity", folders)
