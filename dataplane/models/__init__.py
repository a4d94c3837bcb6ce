"""Model definitions: one file per family, over the parts in `layers`."""
