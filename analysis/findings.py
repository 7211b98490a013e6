# %% [markdown]
# # What the rows say about the paper's claims
# `python -m groupwise.analysis.findings` writes this into results/tables/findings.md.

# %%
from IPython.display import Markdown

from groupwise.analysis.findings import findings_table, rules, summary, verdicts
from groupwise.analysis.results import Folders

found = verdicts(Folders.of_checkout())
Markdown(f"{summary(found)}\n\n{findings_table(found)}\n\n{rules()}")
