"""Names that exist for DeepSpeed's sake."""
