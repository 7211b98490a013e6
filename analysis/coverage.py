# %% [markdown]
# # Every cell of every table and figure
# `python -m groupwise.analysis.coverage` writes this into results/tables/coverage.md.

# %%
from IPython.display import Markdown

from groupwise.analysis.coverage import coverage, machines, page
from groupwise.analysis.results import Folders

folders = Folders.of_checkout()
Markdown(page(coverage(folders), machines(folders.measured)))
