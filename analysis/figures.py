# %% [markdown]
# # Every figure, with the paper's numbers
# `make figures` writes them in print quality, as PDF and PNG; the tables are in [another notebook](results.ipynb).

# %%
import io

import PIL.Image
from IPython.display import Image, Markdown, display

from groupwise.analysis.figures import KINDS, make
from groupwise.analysis.results import Folders

folders = Folders.of_checkout()


def shown(figure):
    """Small enough for a page."""
    large, small = io.BytesIO(), io.BytesIO()
    figure.savefig(large, dpi=110)
    PIL.Image.open(large).convert("RGB").quantize(32, dither=PIL.Image.Dither.NONE).save(small, "png", optimize=True)
    return Image(small.getvalue())


for name in KINDS:
    display(Markdown(f"**{name}**"), shown(make(name, folders).figure))

# %% [markdown]
# The runs behind a figure: one row each.

# %%
make("adaptive_vs_fixed", folders).runs.rows[["cell", "seed", "scale", "hash", "git.sha"]]
