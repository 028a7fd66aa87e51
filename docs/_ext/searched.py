"""What people search for, and the section that answers it: entries of the site's index."""

from sphinx import addnodes

ANSWERS = {
    "reading#it-is-0": ("KL is 0", "KL is zero", "KL stays 0"),
    "reading#it-is-negative": ("KL is negative", "negative KL"),
    "reading#it-explodes": ("KL explodes", "KL diverges", "KL is NaN"),
    "reading#it-never-reaches-its-target": ("KL never reaches its target", "KL is too high"),
    "reading#it-oscillates": ("KL oscillates",),
    "estimators": ("k1", "k2", "k3", "k3+", "which estimator"),
    "grpo#gspo": ("GSPO",),
    "hidden_states": ("OOM", "out of memory"),
    "install#does-it-run-on-mine": (
        *("RTX", "RTX 3090", "RTX 4090", "RTX 5090", "3090", "4090", "5090", "A100", "H100"),
        *("H200", "B200", "AMD", "ROCm", "MI300", "Apple", "macOS", "Windows"),
    ),
    "logits#padded-vocabularies": ("151936", "padded vocabulary"),
}
"""Page and anchor, and the phrases that must find them first. `make docs` asks the search."""


def setup(app):
    """Add the entries to each page. The search leaves out a number that is no entry."""

    def add(app, doctree):
        for place, phrases in ANSWERS.items():
            page, _, anchor = place.partition("#")
            if page == app.env.docname:
                entries = [("single", phrase, anchor, "main", None) for phrase in phrases]
                doctree.append(addnodes.index(entries=entries))

    app.connect("doctree-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
