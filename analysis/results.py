# %% [markdown]
# # Every table and figure, and what the rows say about the paper's claims
# Files of the same: `make tables` and `make figures`.

# %%
from IPython.display import Image, Markdown, display

from groupwise.analysis.coverage import coverage
from groupwise.analysis.figure_style import content
from groupwise.analysis.figures import KINDS, make
from groupwise.analysis.findings import findings_table, rules, summary, verdicts
from groupwise.analysis.results import TABLES, Folders
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import table_page

folders = Folders.of_checkout()
for name in TABLES:
    display(Markdown(table_page(name, folders)))

# %% [markdown]
# A table as data: one line a number of the paper.

# %%
table_lines("cifar", folders)

# %%
for name in KINDS:
    display(Image(content(make(name, folders).figure, "png"), width=720))

# %% [markdown]
# The runs behind a figure: one row each.

# %%
make("adaptive_vs_fixed", folders).runs.rows[["cell", "seed", "scale", "hash", "git.sha"]]

# %%
found = verdicts(folders)
Markdown(f"{summary(found)}\n\n{findings_table(found)}\n\n{rules()}")

# %% [markdown]
# Every cell, and what became of it.

# %%
coverage(folders)
