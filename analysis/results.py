# %% [markdown]
# # Every table, and what the rows say about the paper's claims
# Each table has the paper's numbers beside ours; `make tables` writes the same as files. The figures are in
# [the next notebook](figures.ipynb). Both need a checkout of the project.

# %%
from IPython.display import Markdown, display

from groupwise.analysis.coverage import coverage
from groupwise.analysis.findings import findings_table, rules, summary, verdicts
from groupwise.analysis.results import TABLES, Folders
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import table_page

folders = Folders.of_checkout()
for name in TABLES:
    display(Markdown(table_page(name, folders)))

# %% [markdown]
# A table as data: each number of the paper, at each scale that is shown.

# %%
table_lines("cifar", folders)

# %% [markdown]
# The paper's claims, and whether the rows confirm them.

# %%
found = verdicts(folders)
Markdown(f"{summary(found)}\n\n{findings_table(found)}\n\n{rules()}")

# %% [markdown]
# Every cell, with its status.

# %%
coverage(folders)
