"""What leaves a full pool first: the tree of its contents, and a ranking of leaves per file."""
