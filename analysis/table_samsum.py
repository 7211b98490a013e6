# %% [markdown]
# # SAMSum: GPT-2-xl and a model of GPT-3's size with LoRA
# Table 6: ROUGE; GPT-3 is not public, so our cells there are of OPT-175B.
# Files of the same: `python -m groupwise.analysis.tables samsum`.

# %%
from IPython.display import Markdown

from groupwise.analysis.results import Folders
from groupwise.analysis.table_lines import table_lines
from groupwise.analysis.tables import table_page

folders = Folders.of_checkout()
Markdown(table_page("samsum", folders))

# %% [markdown]
# The same lines as data: one a number of the paper.

# %%
table_lines("samsum", folders)
