"""Routes of Jupyter's server: what the sidebar shows and asks. They read run folders and write to inboxes, no more."""
