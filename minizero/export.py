"""One whole state dict from a sharded checkpoint, and files for others."""
