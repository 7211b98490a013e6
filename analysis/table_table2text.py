# %% [markdown]
# # E2E and DART: GPT-2 writes text from tables
# Table 5: BLEU and ROUGE-L.
# Files of the same: `python -m groupwise.analysis.tables table2text`.

# %%
from IPython.display import Markdown

from groupwise.analysis.results import Folders
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import table_page

folders = Folders.of_checkout()
Markdown(table_page("table2text", folders))

# %% [markdown]
# The same lines as data: one a number of the paper.

# %%
table_lines("table2text", folders)
