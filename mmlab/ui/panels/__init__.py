"""The panels: one file each, with its page side of the same name in `static/panels/`."""
